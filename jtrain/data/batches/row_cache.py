"""Row caches: rows in memory, or in a folder that later runs use too."""

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.sources.source import Source
from jtrain.errors import DataError
from jtrain.io.formatting import format_bytes

MEMORY = "memory"
DIGEST = np.dtype("<u8")  # of each row; 0 for a row that is not cached


def cache_rows(source: Source, where: str) -> Source:
    """Return the source, cached: `memory`, a folder, or empty for no cache.

    Raises:
        DataError: if there is no room for all rows.
    """
    if not where:
        return source
    return MemoryCache(source) if where == MEMORY else DiskCache(source, where)


class CachedRows:
    """The rows of `source`, each read from it once; the same rows for every reader.

    A row is cached as its bytes and a digest of the bytes. The digest is written last and checked
    at every read from the cache: a row that was half written when a process was killed, or that two
    processes wrote at once, is read from the source again.
    """

    def __init__(self, source: Source, rows: Mapping[str, np.ndarray], digests: np.ndarray):
        self.source = source
        self._rows, self._digests = rows, digests

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        rows = {name: array[indices] for name, array in self._rows.items()}
        missing = np.flatnonzero(self._digests[indices] != _digests(rows))
        if len(missing):
            read = self.source[indices[missing]]
            found = _digests(read)
            for name, array in self._rows.items():
                rows[name][missing] = read[name]
                array[indices[missing]] = read[name]
            self._digests[indices[missing]] = found
        return rows


class MemoryCache(CachedRows):
    """Rows cached in the memory of this process; each process caches the rows that it reads.

    Raises:
        DataError: if all rows take more memory than is free.
    """

    def __init__(self, source: Source):
        example = source[np.zeros(1, np.int64)]
        needed, free = _bytes(source, example), psutil.virtual_memory().available
        if needed > free:
            raise DataError(
                f"A cache in memory was requested, which takes {format_bytes(needed)} for "
                f"{len(source):,} rows, and {format_bytes(free)} are free. Set data.cache to a "
                f"folder, or data.cache= for no cache."
            )
        rows = {name: np.empty((len(source), *x.shape[1:]), x.dtype) for name, x in example.items()}
        super().__init__(source, rows, np.zeros(len(source), DIGEST))

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryCache, (self.source,)


class DiskCache(CachedRows):
    """Rows cached in files below `folder`, which many processes and runs can use at once.

    Each version of the source (`version`, or else its fingerprint) has a folder of its own, so that
    no row of an older version is used. Room for all rows is allocated when the cache is created.

    Raises:
        DataError: if the disk has no room, the folder cannot be written, or the source has neither
            a version nor a fingerprint.
    """

    def __init__(self, source: Source, folder: str | Path):
        self.folder = Path(folder)
        version = getattr(source, "version", lambda: fingerprint(source))()
        if not version:
            raise DataError(
                f"A cache in {folder} was requested, and {type(source).__name__} has no "
                f"fingerprint that identifies its rows. Give it a method `version() -> str`, or "
                f"set data.cache=memory."
            )
        example = source[np.zeros(1, np.int64)]
        layout = ", ".join(
            f"{name} {x.dtype.str} {x.shape[1:]}" for name, x in sorted(example.items())
        )
        self.path = self.folder / xxhash.xxh3_64(f"{version}; {layout}".encode()).hexdigest()
        try:
            self._create(_bytes(source, example), len(source), example, version)
            rows = {
                name: np.memmap(self.path / name, x.dtype, "r+", shape=(len(source), *x.shape[1:]))
                for name, x in example.items()
            }
            digests = np.memmap(self.path / "digests", DIGEST, "r+", shape=(len(source),))
        except (OSError, ValueError) as error:
            raise DataError(
                f"A cache of {format_bytes(_bytes(source, example))} in {folder} was requested and "
                f"cannot be created ({error}). Make room, set data.cache to a folder on another "
                f"disk, or remove it and start again: rm -r {self.path}"
            ) from error
        super().__init__(source, rows, digests)

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskCache, (self.source, self.folder)

    def _create(
        self, needed: int, rows: int, example: Mapping[str, np.ndarray], version: str
    ) -> None:
        """Create the files with all of their room, under the final name only when they are
        complete.

        A write to a mapped file for which the disk has no room kills the process (SIGBUS).
        """
        if self.path.is_dir():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(f"it takes {needed:,} bytes for {rows:,} rows, and {free:,} are free")
        partial = self.folder / f".making-{uuid.uuid4().hex}"
        partial.mkdir()  # mkdtemp would make it 0700 whatever the umask is
        try:
            sizes = {name: rows * array[0].nbytes for name, array in example.items()}
            for name, size in {**sizes, "digests": rows * DIGEST.itemsize}.items():
                with (partial / name).open("wb") as file:
                    if size:
                        os.posix_fallocate(file.fileno(), 0, size)
            (partial / "source.txt").write_text(f"{version}\n", encoding="utf-8")
            partial.rename(self.path)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if not self.path.is_dir():  # else another process created it first
                raise


def _digests(rows: Mapping[str, np.ndarray]) -> np.ndarray:  # uint64, b; never 0
    """Return the digest of each row, over all its arrays."""
    arrays = [np.ascontiguousarray(rows[name]) for name in sorted(rows)]
    found = np.empty(len(arrays[0]), DIGEST)
    for row in range(len(found)):
        digest = xxhash.xxh3_64()
        for array in arrays:
            digest.update(array[row : row + 1].reshape(-1).view(np.uint8).data)
        found[row] = digest.intdigest() or 1
    return found


def _bytes(source: Source, example: Mapping[str, np.ndarray]) -> int:
    return len(source) * (DIGEST.itemsize + sum(array[0].nbytes for array in example.values()))
