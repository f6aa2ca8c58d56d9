"""File sharding between processes: TensorFlow's policies AUTO, FILE, DATA and OFF.

Only files that can only be streamed need a policy. Rows by index are sharded by index, each read by
one process, whatever file it is in: `Shuffled(...).shard(index, count)`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jtrain.errors import ConfigError, DataError

T = TypeVar("T")


class FileShard(NamedTuple):
    """The part that one process reads: its files, and every `every`-th of their records."""

    files: list[Path]
    first: int
    """The first record, from 0, that this process reads."""
    every: int
    own: bool
    """True if the records differ between processes, and so depend on the number of processes."""
    summary: str
    """The policy in effect and the reason for it: a line for the log."""

    def select(self, records: Iterable[T]) -> Iterator[T]:
        """Return this process's records among those of `files`, one file after the other."""
        return islice(records, self.first, None, self.every)


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
        raise ConfigError(f"sharing {policy!r} is none of auto, file, data, off. Set sharing=auto.")
    if not 0 <= index < count:
        raise ConfigError(
            f"Process {index} of {count} was requested; processes count from 0. "
            f"Set an index in 0 .. {count - 1}."
        )
    files = list(files)
    sizes = f"{len(files)} file{'s' * (len(files) != 1)}, {count} process{'es' * (count != 1)}"
    if policy == "auto":
        even = len(files) >= count and len(files) % count == 0
        chosen = "file" if even else "data"
        why = f"sharing=auto took {chosen}"
    else:
        chosen, why = policy, f"sharing={policy}"
    if chosen == "off":
        return FileShard(files, 0, 1, True, f"{sizes}: each reads all of them ({why})")
    if chosen == "data":
        summary = f"{sizes}: each reads all of them and keeps one record in {count} ({why})"
        return FileShard(files, index, count, False, summary)
    if len(files) < count:
        raise DataError(
            f"sharing=file was requested with {sizes}: {count - len(files)} would read nothing. "
            f"Set sharing=data, write {count} files, or start {len(files)} processes."
        )
    own = files[index::count]
    order = ", the order of rows depends on the number of processes" if count > 1 else ""
    summary = f"{sizes}: this one reads {len(own)} of its own ({why}){order}"
    return FileShard(own, 0, 1, True, summary)


def add_readers(status: Mapping[str, Any], step: int, count: int) -> list[list[int]]:
    """Return `readers` of run.json when `count` processes resume after a step.

    One pair for each start: a step, and the number of processes that read the steps after it.

    Args:
        status: the current content of run.json.
    """
    return [pair for pair in status.get("readers", []) if pair[0] < step] + [[step, count]]


def count_readers(status: Mapping[str, Any], steps: Iterable[int]) -> dict[int, int]:
    """Return the number of processes that read each step's batch, where run.json has it."""
    starts = status.get("readers", [])
    return {
        step: next(count for after, count in reversed(starts) if after < step)
        for step in steps
        if starts and starts[0][0] < step
    }
