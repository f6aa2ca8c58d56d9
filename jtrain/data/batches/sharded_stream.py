"""Batches of streamed files, sharded between the processes of a run."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.batches.by_step import RowShard
from jtrain.data.batches.file_sharding import shard_files
from jtrain.data.batches.fingerprint import fingerprint_files
from jtrain.data.batches.stream import Stream, Streamed
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers


class ShardedStream:
    """`batches[step]`: `size` rows of streams over `files`, sharded by `policy`.

    With `file` each process has files and a stream of its own, which restarts when the files end:
    so no process waits for another at a ragged end, and no process skips a row. With `data` all
    processes read one stream, and the order of its rows is that of a single process. With `off`
    each process has a stream over all files, whose next rows are its shard of the batch.

    Args:
        files: in the same order in every process.
        open: opens a stream over some of the files; always the same stream.
        row: turns an item of the stream into arrays by name; all of one shape.
        size: rows a batch, over all processes.
        policy: see `jtrain.data.batches.file_sharding.shard_files`.
        every: see `Streamed`.
    """

    ragged = False

    @plain_numbers
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
        self._open_files, self._row, self._every = open, row, every
        self._begin(0, 1)

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        return self._batches[step] | {"row": self._shard.row, "mask": self._shard.mask(self.size)}

    def shard(self, index: int, count: int) -> "ShardedStream":
        """Return the same batches, of which process `index` of `count` makes its rows.

        Raises:
            DataError: `file` with fewer files than processes.
            ConfigError: a batch that does not divide into the processes.
        """
        sharded = copy.copy(self)
        sharded._begin(index, count)
        return sharded

    def fingerprint(self) -> str:
        """Return the fingerprint of the files."""
        return fingerprint_files(self._files)

    def state(self, step: int) -> dict[str, Any]:
        """Return a place at or before a step, as JSON; under `shares` if each process has a stream.

        `restore` takes the merged `shares` of all processes.
        """
        place = self._batches.state(step)
        return {"shares": {f"{self._index}": place}} if self._own else place

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Resume from a place that `state` of equal batches returned.

        Raises:
            DataError: if the stream is another, or was sharded between another number of processes.
        """
        saved = len(state["shares"]) if "shares" in state else 0
        current = self._count if self._own else 0
        if saved != current:
            raise DataError(
                f"The run saved its place in {_streams(saved)}, and would resume with "
                f"{_streams(current)} ({self.summary}). Resume with {saved or 'any number of'} "
                f"processes and sharing={'file' if saved else 'data'}; or start a new run with "
                f"sharing=data, which resumes with any number."
            )
        self._batches.restore(state["shares"][f"{self._index}"] if saved else state)

    def _open_stream(self, files: Sequence[Path], size: int) -> Streamed:
        return Streamed(lambda: self._open_files(files), self._row, size=size, every=self._every)

    def _begin(self, index: int, count: int) -> None:
        self._shard, self._index, self._count = RowShard(self.size, index, count), index, count
        files = shard_files(self._files, index=index, count=count, policy=self._policy)
        self.summary = f"data: {files.summary}"
        """The policy in effect and the reason for it: a line for the log."""
        self._own = files.own
        if self._own:
            self._batches = self._open_stream(files.files, self.size // count)
        else:
            self._batches = self._open_stream(self._files, self.size).shard(index, count)


def _streams(count: int) -> str:
    return f"{count} streams, one a process" if count else "one stream for all"
