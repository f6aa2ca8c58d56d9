"""Rows that are kept once they were read: in memory, or in a folder that later runs use too."""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.sources.source import Source
from jtrain.errors import DataError

MEMORY = "memory"
DIGEST = np.dtype("<u8")  # of each row, and 0 where none is kept
_log = logging.getLogger(__name__)


class Versioned(Protocol):
    """A source that says by what a cache of its rows is known."""

    def version(self) -> str:
        """A line that changes whenever a row may have changed."""
        ...


def cached(source: Source, where: str) -> Source:
    """Return the source, cached: `memory`, a folder, or empty for no cache.

    Raises:
        DataError: where there is no room for all rows.
    """
    if not where:
        return source
    return MemoryCache(source) if where == MEMORY else DiskCache(source, where)


class CachedRows:
    """The rows of `source`, each read from it once; the same rows, whoever reads them when.

    A row is kept as its bytes and a digest of them, which is written last and checked whenever the
    row is taken from the cache: one that was half written when a process was killed, or that two
    wrote at once, is not taken, but read again.
    """

    def __init__(self, source: Source, kept: Mapping[str, np.ndarray], digests: np.ndarray):
        self.source = source
        self._kept, self._digests = kept, digests

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        rows = {name: array[indices] for name, array in self._kept.items()}
        said = self._digests[indices]
        known = np.array([bool(s) for s in said]) & (said == _digests(rows))
        missing = np.flatnonzero(~known)
        if len(missing):
            read = self.source[indices[missing]]
            found = _digests(read)
            for name, array in self._kept.items():
                rows[name][missing] = read[name]
                array[indices[missing]] = read[name]
            self._digests[indices[missing]] = found
        return rows

    def fingerprint(self) -> str:
        """What the data is, in a line: that of the source."""
        return fingerprint(self.source)


class MemoryCache(CachedRows):
    """Rows kept in the memory of this process; each process of several keeps those that it reads.

    Raises:
        DataError: if all rows take more memory than is free.
    """

    def __init__(self, source: Source):
        like = source[np.zeros(1, np.int64)]
        needed, free = _bytes(source, like), _free_memory()
        if needed > free:
            raise DataError(
                f"A cache in memory was asked for, which takes {_gb(needed)} for {len(source):,} "
                f"rows, and {_gb(free)} are free. Set data.cache to a folder, or data.cache= to "
                f"keep nothing."
            )
        kept = {name: np.empty((len(source), *x.shape[1:]), x.dtype) for name, x in like.items()}
        super().__init__(source, kept, np.zeros(len(source), DIGEST))

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryCache, (self.source,)


class DiskCache(CachedRows):
    """Rows kept in files below `folder`, which any number of processes and runs use at once.

    They lie in a folder of their own for each version of the source (`version`, or where it has
    none its fingerprint), so that no row of a source that was changed since is taken. Room for all
    rows is taken when it is made.

    Raises:
        DataError: if the disk has no room, the folder cannot be written, or nothing tells one
            version of the source from another.
    """

    def __init__(self, source: Source, folder: str | Path):
        self.folder = Path(folder)
        version = getattr(source, "version", lambda: fingerprint(source))()
        if not version:
            raise DataError(
                f"A cache in {folder} was asked for, and {type(source).__name__} has no "
                f"fingerprint by which its rows would be known again. Give it a method "
                f"`version() -> str`, or set data.cache=memory."
            )
        like = source[np.zeros(1, np.int64)]
        spelt = ", ".join(f"{name} {x.dtype.str} {x.shape[1:]}" for name, x in sorted(like.items()))
        self.path = self.folder / _short(f"{version}; {spelt}")
        try:
            self._make(_bytes(source, like), len(source), like, version)
            kept = {
                name: np.memmap(self.path / name, x.dtype, "r+", shape=(len(source), *x.shape[1:]))
                for name, x in like.items()
            }
            digests = np.memmap(self.path / "digests", DIGEST, "r+", shape=(len(source),))
        except (OSError, ValueError) as error:
            raise DataError(
                f"A cache of {_gb(_bytes(source, like))} in {folder} was asked for and cannot be "
                f"had ({error}). Make room, set data.cache to a folder on another disk, or remove "
                f"it and begin anew: rm -r {self.path}"
            ) from error
        super().__init__(source, kept, digests)

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskCache, (self.source, self.folder)

    def _make(self, needed: int, rows: int, like: Mapping[str, np.ndarray], version: str) -> None:
        """Make the files, all of their room taken, under the final name only when they are whole.

        A write to a mapped file for which the disk has no room ends the process (SIGBUS).
        """
        if self.path.is_dir():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if others := [entry.name for entry in self.folder.iterdir() if entry.is_dir()]:
            _log.warning(
                "%s also holds the rows of other versions or sizes (%s); remove what is not used",
                self.folder,
                ", ".join(sorted(others)[:3]),
            )
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(f"it takes {needed:,} bytes for {rows:,} rows, and {free:,} are free")
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=self.folder))
        try:
            for name, array in like.items():
                _allocate(making / name, rows * array[0].nbytes)
            _allocate(making / "digests", rows * DIGEST.itemsize)
            (making / "source.txt").write_text(f"{version}\n", encoding="utf-8")
            making.rename(self.path)
        except OSError:
            shutil.rmtree(making, ignore_errors=True)
            if not self.path.is_dir():  # another process was first
                raise


def _allocate(path: Path, size: int) -> None:
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)


def _digests(rows: Mapping[str, np.ndarray]) -> np.ndarray:  # uint64, b; never 0
    """The digest of each row, of all its arrays together."""
    import xxhash

    arrays = [np.ascontiguousarray(rows[name]) for name in sorted(rows)]
    found = np.empty(len(arrays[0]), DIGEST)
    for row in range(len(found)):
        digest = xxhash.xxh3_64()
        for array in arrays:
            digest.update(array[row : row + 1].reshape(-1).view(np.uint8).data)
        found[row] = digest.intdigest() or 1
    return found


def _bytes(source: Source, like: Mapping[str, np.ndarray]) -> int:
    return len(source) * (DIGEST.itemsize + sum(array[0].nbytes for array in like.values()))


def _free_memory() -> int:
    """Bytes that can be taken without swapping, as the system says; where it does not, no limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 1 << 62


def _short(text: str) -> str:
    import xxhash

    return xxhash.xxh3_64(text.encode()).hexdigest()


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
