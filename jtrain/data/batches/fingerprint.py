"""Fingerprints of data sets: a line with the size and a digest of samples of the bytes.

Two sets that differ in size or in a sample have different fingerprints. Small arrays in memory are
read completely; of everything else a fixed selection of blocks is read, spread over all of it. So a
set that was recreated, cut or reordered is noticed; one changed byte in a large file may not be.
Paths and dates are not part of a fingerprint: a set may be moved.
"""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash

from jtrain.io.regular_files import open_regular

WHOLE = 1 << 26  # bytes; smaller arrays are read completely
BLOCKS, BLOCK = 256, 1 << 16  # of a larger array: the number of blocks, and the bytes of each
FILE_BLOCK = 1 << 12  # bytes of each block of a file; BLOCKS of them over all files
ROWS = 32  # sampled from a source without a fingerprint of its own
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly, for any number of them


@runtime_checkable
class Fingerprinted(Protocol):
    """A source, a stream or batches with a fingerprint of their data."""

    def fingerprint(self) -> str:
        """Return the line; the same on any machine and with any number of processes."""
        ...


def fingerprint(data: Any) -> str:
    """Return the fingerprint of batches or of a source; empty if that needs reading all of it.

    Batches have the fingerprint of their `source` or `sources`. A source without a `fingerprint` of
    its own is identified by a few of its rows, unless those rows change between reads.
    """
    if isinstance(data, Fingerprinted):
        return data.fingerprint()
    if hasattr(data, "source"):
        return fingerprint(data.source)
    if isinstance(sources := getattr(data, "sources", None), Mapping):
        return "; ".join(f"{name}: {fingerprint(source)}" for name, source in sources.items())
    if hasattr(data, "__len__") and not hasattr(data, "size"):
        return _sample_rows(data)
    return ""


def fingerprint_arrays(rows: int, arrays: Mapping[str, np.ndarray]) -> str:
    """Return `60000 rows 7c1e...`: the fingerprint of arrays by name, each n ... ."""
    digest = xxhash.xxh3_64()
    for name in sorted(arrays):
        digest.update(name.encode())
        _add(digest, arrays[name])
    return f"{rows} rows {digest.hexdigest()}"


def fingerprint_files(paths: Sequence[str | Path], *more: str) -> str:
    """Return `3 files of 1234 bytes 7c1e...`: names, sizes, sampled blocks and `more`.

    Args:
        paths: in the order in which they are read.
        more: other text that the data depends on.
    """
    digest, total = xxhash.xxh3_64(), 0
    each = max(2, BLOCKS // max(len(paths), 1))
    for path in map(Path, paths):
        size = path.stat().st_size
        total += size
        digest.update(os.fsencode(f"{path.name} {size}"))
        with open_regular(path, buffering=0) as file:
            for place in _places(size, FILE_BLOCK, each):
                file.seek(place)
                digest.update(file.read(FILE_BLOCK))
    digest.update("\n".join(more).encode())
    files = f"{len(paths)} file{'s' if len(paths) != 1 else ''}"
    return f"{files} of {total} bytes {digest.hexdigest()}"


def fingerprint_tokens(tokens: Any) -> str:
    """Return the fingerprint of a row of tokens in memory, or that of a folder of tokens."""
    return (
        tokens.fingerprint()
        if isinstance(tokens, Fingerprinted)
        else fingerprint_arrays(len(tokens), {"": tokens})
    )


def _sample_rows(source: Any) -> str:
    """Return the digest of a few rows; empty if a second read gives other rows."""
    rows = len(source)
    indices = np.unique(np.fromiter(_places(rows, 1, ROWS), np.int64))
    first, second = (
        fingerprint_arrays(rows, {name: np.asarray(x) for name, x in source[indices].items()})
        for _ in range(2)
    )
    return first if first == second else ""


def _add(digest: Any, array: np.ndarray) -> None:
    digest.update(f"{array.dtype} {array.shape}".encode())
    if array.nbytes <= WHOLE:
        digest.update(_bytes(array))
        return
    rows = max(1, BLOCK * len(array) // array.nbytes)
    for place in _places(len(array), rows, BLOCKS):
        digest.update(_bytes(array[place : place + rows]))


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _places(total: int, length: int, count: int) -> Iterator[int]:
    """Return where blocks of `length` begin: the first, the last, and others spread between."""
    last = max(total - length, 0)
    if total <= length * count:
        yield from range(0, total, length)
        return
    yield from (0, last)
    yield from (int(k * _GOLDEN % 1 * last) for k in range(1, count - 1))


def digest_batch(batch: Mapping[str, Any]) -> int:
    """Return the XXH3 digest of the names, types, shapes and bytes of a batch's arrays."""
    hasher = xxhash.xxh3_64()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        hasher.update(_header(name, array.dtype, array.shape))
        hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.intdigest()


@functools.lru_cache(maxsize=256)  # the same for every batch, and half of the time of a small one
def _header(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype.str} {shape} ".encode()
