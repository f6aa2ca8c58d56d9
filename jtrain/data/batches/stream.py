"""Batches by step from data that can only be streamed; a saved place replaces rereading."""

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.data.batches.by_step import ReadLock, RowShard, add_places
from jtrain.data.batches.fingerprint import Fingerprinted
from jtrain.errors.plain_numbers import plain_numbers

RECENT = 4  # batches that stay in memory for repeated reads
PLACES = 17  # newest saved places: more than is ever prefetched beyond a checkpoint


@runtime_checkable
class Stream(Protocol):
    """An endless stream of items, and a position in it that can be saved."""

    def next(self) -> Any:
        """Return the next item."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position as JSON: the items that follow depend on nothing else."""
        ...

    def restore(self, state: dict[str, Any], /) -> None:
        """Go to the position that an equal stream had when it returned `state`."""
        ...


class Streamed:
    """`batches[step]`: `size` rows of a stream; a function of the step, like all batches.

    Consecutive steps are read in order. For another step the stream goes to the nearest saved place
    before that step, or to the beginning, and reads from there. A run saves a place in each of its
    checkpoints (`state`) and resumes from that place (`restore`), bit for bit. Each process reads
    all of the stream, and makes rows of its own shard only.

    Args:
        open: opens the stream; every call returns an equal stream.
        row: turns an item of the stream into arrays by name; all of one shape.
        size: rows a batch.
        every: steps between two saved places. Resuming reads at most this many steps again.
    """

    ragged = False
    summary = "data: a stream, each process reads all of it and keeps its own rows of every batch"

    @plain_numbers
    def __init__(
        self,
        open: Callable[[], Stream],
        row: Callable[[Any], dict[str, np.ndarray]],
        *,
        size: int,
        every: int = 100,
    ):
        self.size, self._open, self._row, self._every = size, open, row, every
        self._restart(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"Steps count from 0; batch {step} was requested.")
        with self._lock:  # the run may look at a batch while a thread prefetches another
            own = {name: array.copy() for name, array in self._read(step).items()}
        return add_places(own, {"row": self._shard.row, "mask": self._shard.mask(self.size)})

    def shard(self, index: int, count: int) -> "Streamed":
        """Return the same batches, with only the rows of process `index` of `count`."""
        sharded = copy.copy(self)
        sharded._restart(RowShard(self.size, index, count))
        return sharded

    def fingerprint(self) -> str:
        """Return the fingerprint of the stream; empty if it has none."""
        return self._stream.fingerprint() if isinstance(self._stream, Fingerprinted) else ""

    def state(self, step: int) -> dict[str, Any]:
        """Return a place at or before a step, as JSON; thread-safe, at any read position."""
        places = self._places.copy()
        nearest = max(place for place in places if place <= step)
        return {"step": nearest, "stream": places[nearest]}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Resume from a place that `state` of equal batches returned.

        Raises:
            DataError: if the stream is another.
        """
        self._stream.restore(state["stream"])
        self._next = state["step"]
        self._places[self._next] = state["stream"]

    def _restart(self, part: RowShard) -> None:
        self._shard, self._lock = part, ReadLock()
        self._stream, self._next = self._open(), 0
        self._recent: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self._places = {0: self._stream.state()}

    def _read(self, step: int) -> dict[str, np.ndarray]:
        if step not in self._recent:
            self._seek(step)
            items = self._next_items()
            rows = [self._row(items[place]) for place in self._shard.row]
            self._recent[step] = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        return self._recent[step]

    def _seek(self, step: int) -> None:
        """Read up to a step's batch, from the nearest place before it."""
        nearest = max(place for place in self._places if place <= step)
        if not nearest <= self._next <= step:
            self._stream.restore(self._places[nearest])
            self._next = nearest
        while self._next < step:
            self._next_items()

    def _next_items(self) -> list[Any]:
        """Return the items of the next batch."""
        items = [self._stream.next() for _ in range(self.size)]
        self._next += 1
        # After the batch: a checkpoint is saved there before the next batch is read.
        if self._next % self._every == 0 and self._next not in self._places:
            self._places[self._next] = self._stream.state()
            for old in sorted(self._places)[1:-PLACES]:  # the beginning stays
                del self._places[old]
        return items
