"""What a data set is, in a line: how much there is of it, and a digest of samples of its bytes.

Two sets that differ in their size, or in a sample, have two fingerprints. What lies in memory and
is not large is read whole; of the rest blocks are read that lie all over it, always the same ones.
So a set that was made anew, cut or mixed up is noticed; one changed byte in a large file may not
be. A place or a date is no part of it: a set may be moved.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

WHOLE = 1 << 26  # bytes of an array that are all read
BLOCKS, BLOCK = 256, 1 << 16  # of a larger one: how many, and the bytes of each
OF_FILES = 1 << 12  # bytes of each block of a file; so many blocks over all files
ROWS = 32  # of a source that knows no better
_GOLDEN = 0.6180339887498949  # its multiples lie evenly within 0 .. 1, however many are taken


@runtime_checkable
class Fingerprinted(Protocol):
    """A source, a stream or batches that say what their data is."""

    def fingerprint(self) -> str:
        """The line; the same wherever, whenever and by however many processes it is asked for."""
        ...


def fingerprint(data: Any) -> str:
    """The fingerprint of batches or of a source; empty where it can only be had by reading it all.

    Batches are what they are made of (`source`, `sources`). A source without a `fingerprint` of its
    own is told by a few of its rows, unless these are others each time that they are read.
    """
    if isinstance(data, Fingerprinted):
        return data.fingerprint()
    if hasattr(data, "source"):
        return fingerprint(data.source)
    if isinstance(sources := getattr(data, "sources", None), Mapping):
        return "; ".join(f"{name}: {fingerprint(source)}" for name, source in sources.items())
    if hasattr(data, "__len__") and not hasattr(data, "size"):
        return _of_rows(data)
    return ""


def of_arrays(rows: int, arrays: Mapping[str, np.ndarray]) -> str:
    """`60000 rows 7c1e...`: arrays by name, each n ... ."""
    digest = _digest()
    for name in sorted(arrays):
        digest.update(name.encode())
        _add(digest, arrays[name])
    return f"{rows} rows {digest.hexdigest()}"


def of_files(paths: Sequence[str | Path], *more: str) -> str:
    """`3 files of 1234 bytes 7c1e...`: their names, sizes and blocks of each, and what is said.

    Args:
        paths: in the order in which they are read.
        more: what else makes the data what it is.
    """
    digest, total = _digest(), 0
    each = max(2, BLOCKS // max(len(paths), 1))
    for path in map(Path, paths):
        size = path.stat().st_size
        total += size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb", buffering=0) as file:
            for place in _places(size, OF_FILES, each):
                file.seek(place)
                digest.update(file.read(OF_FILES))
    digest.update("\n".join(more).encode())
    files = f"{len(paths)} file{'s' if len(paths) != 1 else ''}"
    return f"{files} of {total} bytes {digest.hexdigest()}"


def of_values(**values: Any) -> str:
    """`rows=4096 vocab=97`: data that is made of nothing but these."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def of_tokens(tokens: Any) -> str:
    """A row of tokens, in memory or mapped; of a folder what that says."""
    return (
        tokens.fingerprint()
        if isinstance(tokens, Fingerprinted)
        else of_arrays(len(tokens), {"": tokens})
    )


def _of_rows(source: Any) -> str:
    """Of a few rows; read twice, for rows that change are no mark of a data set."""
    rows = len(source)
    indices = np.unique(np.fromiter(_places(rows, 1, ROWS), np.int64))
    first, second = (
        of_arrays(rows, {name: np.asarray(x) for name, x in source[indices].items()})
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
    """Where blocks of `length` begin: the first, the last, and the others all over."""
    last = max(total - length, 0)
    if total <= length * count:
        yield from range(0, total, length)
        return
    yield from (0, last)
    yield from (int(k * _GOLDEN % 1 * last) for k in range(1, count - 1))


def _digest() -> Any:
    import xxhash

    return xxhash.xxh3_64()
