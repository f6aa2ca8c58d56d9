"""Batches as a function of the step, endless or over a finite data set."""

from typing import Protocol, runtime_checkable

from jtrain.core.types import Batch


@runtime_checkable
class Batches(Protocol):
    """A batch as a function of the step: nothing to save, nothing to rewind."""

    size: int  # rows in a batch, over all processes
    ragged: bool  # whether a mask may hide a row

    def __getitem__(self, step: int, /) -> Batch:
        """Return the batch of a step, as numpy arrays."""
        ...

    def shard(self, index: int, count: int) -> "Batches":
        """Return the same batches, of which process `index` of `count` reads its own rows only."""
        ...


@runtime_checkable
class FiniteBatches(Batches, Protocol):
    """A whole data set once, in order: `len` batches, the last padded under its mask."""

    def __len__(self) -> int: ...
