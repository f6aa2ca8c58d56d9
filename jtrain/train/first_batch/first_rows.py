"""The first batch of a run, read once for all that is traced of it."""

import functools

import jax
import numpy as np

from jtrain.core.batches import Batches
from jtrain.core.types import Batch
from jtrain.data.sources.source import to_native
from jtrain.train.experiment_shapes import batch_shapes


class FirstRows:
    """First batch as this process reads it: decoding 256 images may take a second.

    Args:
        batches: with the rows of this process.
        parts: of which this process reads one.
    """

    def __init__(self, batches: Batches, parts: int):
        self._batches, self._parts = batches, parts

    @functools.cached_property
    def own(self) -> Batch:
        """Rows of this process."""
        return {n: to_native(n, array) for n, array in self._batches[0].items()}

    @property
    def repeated(self) -> Batch:
        """Rows of this process, repeated to a batch of full size: to trace with values."""
        parts = self._parts
        own = self.own.items()
        return self.own if parts == 1 else {n: np.concatenate([x] * parts) for n, x in own}

    @functools.cached_property
    def like(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of a full batch, as on the devices."""
        return batch_shapes(self.own, self._batches.size)

    def forget(self) -> None:
        """Free the memory of the rows; they are read again if they are needed again."""
        vars(self).pop("own", None)
