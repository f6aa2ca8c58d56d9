"""Batches by step from data that can only be streamed: streams with a saved place, and loaders."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jtrain.data.batches.by_step import RowShard, ShardedBatches, add_places, check_step
from jtrain.data.batches.fingerprint import Fingerprinted, fingerprint_files
from jtrain.errors import ConfigError, DataError
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


class Streamed(ShardedBatches):
    """`batches[step]`: `size` rows of a stream; a function of the step, like all batches.

    Consecutive steps are read in order. For another step the stream goes to the nearest saved place
    before that step, or to the beginning, and reads from there. A run saves a place in each of its
    checkpoints (`state`) and resumes from that place (`restore`), bit for bit. Each process reads
    all of the stream, and makes rows of its own shard only.

    Args:
        open: opens the stream; every call returns an equal stream.
        row: turns an item of the stream into arrays by name; all of one shape.
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
        self._begin(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        with self._lock:  # the run may look at a batch while a thread prefetches another
            own = {name: array.copy() for name, array in self._read(check_step(step)).items()}
        return add_places(own, self._shard.places(self.size))

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

    def _begin(self, shard: RowShard) -> None:
        self._shard, self._lock = shard, threading.Lock()
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


class FileShard(NamedTuple):
    """The part that one process reads."""

    files: list[Path]
    own: bool
    """True if the records differ between processes, and so depend on the number of processes."""
    summary: str
    """The policy in effect and the reason for it: a line for the log."""


def shard_files(
    files: Sequence[Path], *, index: int, count: int, policy: str = "auto"
) -> FileShard:
    """Return the part of `files` that process `index` of `count` reads.

    By policy:
        `file`: each process reads every count-th file, from the index-th on; no file is read twice.
        `data`: each process reads all files and selects every count-th record.
        `off`: each process reads all files and all records.
        `auto`: `file` if each process gets the same number of files, else `data`.

    With `file` the rows of a batch depend on the number of processes. Every process must pass the
    files in the same order.

    Raises:
        ConfigError: an unknown policy, or an index out of range.
        DataError: `file` with fewer files than processes.

    Source: `tf.data.experimental.AutoShardPolicy`,
    https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy.
    """
    if policy not in ("auto", "file", "data", "off"):
        raise ConfigError(
            f"sharing {policy!r} is not one of auto, file, data, off. Set sharing=auto."
        )
    if not 0 <= index < count:
        raise ConfigError(
            f"Process {index} of {count} was requested; processes count from 0. "
            f"Set an index in 0 .. {count - 1}."
        )
    files = list(files)
    sizes = f"{len(files)} file{'s' * (len(files) != 1)}, {count} process{'es' * (count != 1)}"
    chosen, why = policy, f"sharing={policy}"
    if policy == "auto":
        chosen = "file" if files and len(files) % count == 0 else "data"
        why = f"sharing=auto took {chosen}"
    if chosen == "off":
        return FileShard(files, True, f"{sizes}: each reads all of them ({why})")
    if chosen == "data":
        summary = f"{sizes}: each reads all of them and keeps one record in {count} ({why})"
        return FileShard(files, False, summary)
    if len(files) < count:
        raise DataError(
            f"sharing=file was requested with {sizes}: {count - len(files)} would read nothing. "
            f"Set sharing=data, write {count} files, or start {len(files)} processes."
        )
    own = files[index::count]
    order = ", the order of rows depends on the number of processes" if count > 1 else ""
    summary = f"{sizes}: this one reads {len(own)} of its own ({why}){order}"
    return FileShard(own, True, summary)


class ShardedStream(ShardedBatches):
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
        policy: see `jtrain.data.batches.stream.shard_files`.
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
        self._begin(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        return self._batches[step] | self._shard.places(self.size)

    def fingerprint(self) -> str:
        """Return the fingerprint of the files."""
        return fingerprint_files(self._files)

    def state(self, step: int) -> dict[str, Any]:
        """Return a place at or before a step, as JSON; under `shares` if each process has a stream.

        `restore` takes the merged `shares` of all processes.
        """
        place = self._batches.state(step)
        return {"shares": {f"{self._shard.index}": place}} if self._own else place

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Resume from a place that `state` of equal batches returned.

        Raises:
            DataError: if the stream is another, or was sharded between another number of processes.
        """
        saved = len(state["shares"]) if "shares" in state else 0
        current = self._shard.count if self._own else 0
        if saved != current:
            raise DataError(
                f"The run saved its place in {saved or 'shared'} streams, and would resume with "
                f"{current or 'shared'} ones ({self.summary}). Resume with "
                f"{saved or 'any number of'} processes and sharing={'file' if saved else 'data'}; "
                f"or start a new run with sharing=data, which resumes with any number."
            )
        self._batches.restore(state["shares"][f"{self._shard.index}"] if saved else state)

    def _begin(self, shard: RowShard) -> None:
        self._shard, index, count = shard, shard.index, shard.count
        files = shard_files(self._files, index=index, count=count, policy=self._policy)
        self.summary = f"data: {files.summary}"
        """The policy in effect and the reason for it: a line for the log."""
        self._own = files.own
        size = self.size // count if self._own else self.size
        open_ = lambda: self._open_files(files.files)
        batches = Streamed(open_, self._row, size=size, every=self._every)
        self._batches = batches if self._own else batches.shard(index, count)


class LoaderBatches(ShardedBatches):
    """`batches[step]`: the batches of a loader, which is reopened for each epoch.

    The adapter is a function that yields the batches as arrays by name:

    ```python
    def open_loader():
        for image, label in loader:
            yield {"image": image.numpy(), "label": label.numpy()}

    train = LoaderBatches(open_loader, size=64)
    ```

    A step out of order is reached by reading up to it. So a killed run resumes bit for bit if the
    loader yields the same batches each time it is opened. Each process reads all batches and keeps
    its own rows.

    Raises:
        DataError: no batch at all, or a batch with another number of rows.
    """

    ragged = False
    summary = "data: a loader, each process reads all of it and keeps its own rows of every batch"

    @plain_numbers
    def __init__(self, open_loader: Callable[[], Iterable[Mapping[str, np.ndarray]]], *, size: int):
        self.size, self._open = size, open_loader
        self._begin(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step, row = check_step(step), self._shard.row
        with self._lock:  # the run may look at a batch while a thread prefetches another
            reader = self._first if step >= self._first.earliest else self._second
            batch = reader.read(step)
        own = {name: array[row[0] : row[-1] + 1] for name, array in batch.items()}
        return add_places(own, self._shard.places(self.size))

    def _begin(self, shard: RowShard) -> None:
        self._shard, self._lock = shard, threading.Lock()
        self._first = _LoaderReader(self._open, self.size)
        # Of batches that the run looks at again, such as that of a bad step: each of the two
        # only reads on, and no look makes the other begin again.
        self._second = _LoaderReader(self._open, self.size)


class _LoaderReader:
    """Batches in their order; one before the last that was read opens the loader again."""

    def __init__(self, open_loader: Callable[[], Iterable[Mapping[str, np.ndarray]]], size: int):
        self._open, self._size = open_loader, size
        self._restart()

    @property
    def earliest(self) -> int:
        """The first step that is read without opening the loader again."""
        return self._next - 1

    def read(self, step: int) -> dict[str, np.ndarray]:
        """Return the arrays of a step's batch."""
        if step < self.earliest:
            self._restart()
        while self._next <= step:
            self._last = next(self._batches)
            self._next += 1
        return self._last

    def _restart(self) -> None:
        self._next, self._batches = 0, self._epochs()
        self._last: dict[str, np.ndarray] = {}

    def _epochs(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            count = 0
            for batch in self._open():
                arrays = {name: np.asarray(array) for name, array in batch.items()}
                for name, array in arrays.items():
                    self._check_rows(name, array, count)
                yield arrays
                count += 1
            if not count:
                raise DataError(
                    "A loader gave no batch. Reopen it in the function that LoaderBatches is "
                    "given: a loader that was read to its end gives nothing more."
                )

    def _check_rows(self, name: str, array: np.ndarray, number: int) -> None:
        found = array.shape[0] if array.ndim else None
        if found != self._size:
            rows = "no rows" if found is None else f"{found} rows"
            raise DataError(
                f"Batches of {self._size} rows were requested from a loader, and `{name}` of its "
                f"batch {number} has {rows}. Set its batch size to {self._size} and drop the last "
                f"batch if it is short: drop_last=True (torch), drop_remainder=True (tf.data)."
            )
