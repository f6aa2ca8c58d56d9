"""Data that can only be streamed, as batches by step: a kept place stands for what was read."""

import copy
import json
import operator
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.data.batches import Part

RECENT = 4  # batches that are still known when they are asked for again


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
    before it that it knows, and reads from there: of a run that was killed, one of those in `keep`;
    without any, the beginning. So a run goes on bit for bit, with nothing in its checkpoints.
    Each process reads all of the stream, and makes rows of its own part alone.

    Args:
        open: begins the stream; called once a process, and always gives the same one.
        row: what comes out of it, as arrays by name; all of one shape.
        size: rows a batch.
        keep: a file, `runs/NAME/stream.jsonl` say, for a place every so many steps.
        every: the steps.
    """

    ragged = False

    def __init__(
        self,
        open: Callable[[], Stream],
        row: Callable[[Any], dict[str, np.ndarray]],
        *,
        size: int,
        keep: Path | None = None,
        every: int = 100,
    ):
        self.size, self._open, self._row = size, open, row
        self._keep, self._every = keep, every
        self._begin(Part(size, 0, 1), writes=True)

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
        mine._begin(Part(self.size, index, count), writes=index == 0)
        return mine

    def _begin(self, part: Part, *, writes: bool) -> None:
        self._part, self._writes = part, writes
        self._stream, self._next = self._open(), 0
        self._recent: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self._places = {0: self._stream.state()} | (_read(self._keep) if self._keep else {})

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
            if self._keep and self._writes:
                self._keep.parent.mkdir(parents=True, exist_ok=True)
                with self._keep.open("a", encoding="utf-8") as file:
                    said = {"step": self._next, "state": self._places[self._next]}
                    file.write(json.dumps(said) + "\n")
        self._next += 1
        return [self._stream.next() for _ in range(self.size)]


def _read(path: Path) -> dict[int, Any]:
    """The places that a file has; a line that was cut by a kill is none."""
    places: dict[int, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            said = json.loads(line)
        except ValueError:
            continue
        places[said["step"]] = said["state"]
    return places
