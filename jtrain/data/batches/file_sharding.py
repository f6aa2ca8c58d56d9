"""How processes share out what is read: TensorFlow's AUTO, FILE, DATA and OFF.

Only files that can but be streamed need it. Rows by index are shared by index, each read by one
process alone, whatever files they lie in: `Shuffled(...).shard(index, count)`.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from jtrain.errors import ConfigError, DataError

T = TypeVar("T")


class FileShard(NamedTuple):
    """What one process reads: the files it opens, and of their records each `every`-th."""

    files: list[Path]
    first: int
    """The record, from 0, that is kept first."""
    every: int
    own: bool
    """Whether what comes out depends on the number of processes: each reads something else."""
    told: str
    """What was chosen, and why: a line for the log."""

    def kept(self, records: Iterable[T]) -> Iterator[T]:
        """Of the records of `files`, one file after the other, those of this process."""
        return islice(records, self.first, None, self.every)


def sharing(files: Sequence[Path], *, index: int, count: int, policy: str = "auto") -> FileShard:
    """What process `index` of `count` reads of `files`.

    By policy:
        `file`: whole files of its own, the index-th and each count-th after; nothing is read twice.
        `data`: all files, and of their records each count-th: every process reads all bytes.
        `off`: all files and all records, in every process.
        `auto`: `file` where each process gets as many files, `data` where not.

    With `file` the rows of a batch depend on the number of processes. Every process must give the
    files in one order.

    Raises:
        ConfigError: a policy that is none of these, or an index that is no process's.
        DataError: `file` with fewer files than processes.

    Source: `tf.data.experimental.AutoShardPolicy`,
    https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy.
    """
    if policy not in ("auto", "file", "data", "off"):
        raise ConfigError(f"sharing {policy!r} is none of auto, file, data, off. Set sharing=auto.")
    if not 0 <= index < count:
        raise ConfigError(
            f"Process {index} of {count} was asked for; processes count from 0. "
            f"Set an index in 0 .. {count - 1}."
        )
    files = list(files)
    there = f"{len(files)} file{'s' * (len(files) != 1)}, {count} process{'es' * (count != 1)}"
    if policy == "auto":
        even = len(files) >= count and len(files) % count == 0
        chosen, why = (
            ("file" if even else "data"),
            f"sharing=auto took {'file' if even else 'data'}",
        )
    else:
        chosen, why = policy, f"sharing={policy}"
    if chosen == "off":
        return FileShard(files, 0, 1, True, f"{there}: each reads all of them ({why})")
    if chosen == "data":
        told = f"{there}: each reads all of them and keeps one record in {count} ({why})"
        return FileShard(files, index, count, False, told)
    if len(files) < count:
        raise DataError(
            f"sharing=file was asked for with {there}: {count - len(files)} would read nothing. "
            f"Set sharing=data, write {count} files, or start {len(files)} processes."
        )
    mine = files[index::count]
    order = ", the order of rows depends on the number of processes" if count > 1 else ""
    told = f"{there}: this one reads {len(mine)} of its own ({why}){order}"
    return FileShard(mine, 0, 1, True, told)
