"""Data that can only be streamed, as batches by step: a kept place stands for what was read."""

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.data.batches.by_step import RowShard
from jtrain.data.batches.fingerprint import Fingerprinted

RECENT = 4  # batches that are still known when they are asked for again
PLACES = 16  # that are known of what was read last: more than is ever read ahead of a checkpoint


@runtime_checkable
class Stream(Protocol):
    """Things that come one after another, without end, and a place among them that can be kept."""

    def next(self) -> Any:
        """The next one."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON: what is to come depends on nothing else."""
        ...

    def restore(self, state: dict[str, Any], /) -> None:
        """Goes to where a stream like this one was when it gave `state`."""
        ...


class Streamed:
    """`batches[step]`: `size` rows of a stream; a function of the step, as all batches are.

    Asked for one step after another it reads on. Asked for another it goes to the nearest place
    before it that it knows, and reads from there: without any, from the beginning. A run keeps a
    place in each of its checkpoints (`state`) and goes on from there (`restore`), bit for bit.
    Each process reads all of the stream, and makes rows of its own part alone.

    Args:
        open: begins the stream; called by whoever reads, and always gives the same one.
        row: what comes out of it, as arrays by name; all of one shape.
        size: rows a batch.
        every: steps between two places that are remembered. Going on reads so many at most again.
    """

    ragged = False
    told = "data: a stream, each process reads all of it and keeps its own rows of every batch"

    def __init__(
        self,
        open: Callable[[], Stream],
        row: Callable[[Any], dict[str, np.ndarray]],
        *,
        size: int,
        every: int = 100,
    ):
        self.size, self._open, self._row, self._every = size, open, row, every
        self._begin(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"Steps count from 0; batch {step} was asked for.")
        if step not in self._recent:
            self._go_to(step)
            things = self._things()
            rows = [self._row(things[place]) for place in self._part.row]
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            self._recent[step] = batch
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        own = {name: array.copy() for name, array in self._recent[step].items()}
        return own | {"row": self._part.row, "mask": self._part.mask(self.size)}

    def shard(self, index: int, count: int) -> "Streamed":
        """The same batches, of which only the rows of process `index` of `count` are made."""
        mine = copy.copy(self)
        mine._begin(RowShard(self.size, index, count))
        return mine

    def fingerprint(self) -> str:
        """What the stream is made of, in a line, if it says so."""
        return self._stream.fingerprint() if isinstance(self._stream, Fingerprinted) else ""

    def state(self, step: int) -> dict[str, Any]:
        """A place at or before a step, as JSON, however far beyond it was read; on any thread."""
        places = self._places.copy()
        near = max(known for known in places if known <= step)
        return {"step": near, "stream": places[near]}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Makes a place known that batches like these gave by `state`.

        Raises:
            DataError: if the stream is another.
        """
        self._stream.restore(state["stream"])
        self._next = state["step"]
        self._places[self._next] = state["stream"]

    def _begin(self, part: RowShard) -> None:
        self._part = part
        self._stream, self._next = self._open(), 0
        self._recent: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self._places = {0: self._stream.state()}

    def _go_to(self, step: int) -> None:
        """Reads up to a step's batch, from the nearest place before it."""
        near = max(known for known in self._places if known <= step)
        if not near <= self._next <= step:
            self._stream.restore(self._places[near])
            self._next = near
        while self._next < step:
            self._things()

    def _things(self) -> list[Any]:
        """What the next batch is made of."""
        if self._next % self._every == 0 and self._next not in self._places:
            self._places[self._next] = self._stream.state()
            for old in sorted(self._places)[1:-PLACES]:  # the beginning stays
                del self._places[old]
        self._next += 1
        return [self._stream.next() for _ in range(self.size)]
