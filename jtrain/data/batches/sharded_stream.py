"""Batches of files that can only be streamed, which the processes of a run share out."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.batches.by_step import RowShard
from jtrain.data.batches.file_sharding import sharing
from jtrain.data.batches.fingerprint import of_files
from jtrain.data.batches.stream import Stream, Streamed
from jtrain.errors import DataError


class ShardedStream:
    """`batches[step]`: `size` rows of streams over `files`, shared out by `policy`.

    Where each process has files of its own (`file`) it has a stream of its own too, which begins
    again when they end: so none waits for another at a ragged end, and none leaves a row out. Where
    each reads all (`data`) there is one stream, and the order of its rows is that of one process.
    With `off` each has a stream over all files, and its own rows of the batch are the first of it.

    Args:
        files: in one order in every process.
        open: begins a stream over some of them; always the same one.
        row: what comes out of it, as arrays by name; all of one shape.
        size: rows a batch, over all processes.
        policy: see `jtrain.data.batches.file_sharding.sharing`.
        every: as `Streamed` takes it.
    """

    ragged = False

    def __init__(
        self,
        files: Sequence[Path],
        open: Callable[[Sequence[Path]], Stream],
        row: Callable[[Any], dict[str, np.ndarray]],
        *,
        size: int,
        policy: str = "auto",
        every: int = 100,
    ):
        self.size, self._files, self._policy = size, list(files), policy
        self._stream = lambda some, rows: Streamed(lambda: open(some), row, size=rows, every=every)
        self._begin(0, 1)

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        return self._batches[step] | {"row": self._part.row, "mask": self._part.mask(self.size)}

    def shard(self, index: int, count: int) -> "ShardedStream":
        """The same batches, of which process `index` of `count` makes its rows.

        Raises:
            DataError: `file` with fewer files than processes.
            ConfigError: a batch that does not divide into them.
        """
        mine = copy.copy(self)
        mine._begin(index, count)
        return mine

    def fingerprint(self) -> str:
        """What the data is, in a line."""
        return of_files(self._files)

    def state(self, step: int) -> dict[str, Any]:
        """A place at or before a step, as JSON; of a stream of its own under its part in `shares`.

        Those of all processes together are what `restore` takes.
        """
        place = self._batches.state(step)
        return {"shares": {f"{self._index}": place}} if self._own else place

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Makes a place known that batches like these gave by `state`.

        Raises:
            DataError: if the stream is another, or was shared out among another number.
        """
        there = len(state["shares"]) if "shares" in state else 0
        here = self._count if self._own else 0
        if there != here:
            said = lambda n: f"{n} streams, one a process" if n else "one stream for all"
            raise DataError(
                f"The run kept its place in {said(there)}, and would go on with {said(here)} "
                f"({self.told}). Go on with {there or 'any number of'} processes and sharing="
                f"{'file' if there else 'data'}; or start a new run with sharing=data, which goes "
                f"on with any number."
            )
        self._batches.restore(state["shares"][f"{self._index}"] if there else state)

    def _begin(self, index: int, count: int) -> None:
        self._part, self._index, self._count = RowShard(self.size, index, count), index, count
        chosen = sharing(self._files, index=index, count=count, policy=self._policy)
        self.told = f"data: {chosen.told}"
        """What was chosen, and why: a line for the log."""
        self._own = chosen.own
        if self._own:
            self._batches = self._stream(chosen.files, self.size // count)
        else:
            self._batches = self._stream(self._files, self.size).shard(index, count)
