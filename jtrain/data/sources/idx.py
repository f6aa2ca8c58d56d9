"""Arrays of idx files, the format of MNIST: a header with type and shape, then the numbers."""

import io
import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jtrain.data.sources.files import open_decompressed, read_into
from jtrain.errors import DataError

# By the third byte of the file; all are big-endian. Source: the description of the format at
# http://yann.lecun.com/exdb/mnist/ (archived), "the IDX file format".
TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_DEFLATE_RATIO = 1032  # most bytes from one compressed byte: https://zlib.net/zlib_tech.html


def read_idx(path: str | Path) -> np.ndarray:
    """Return the array of an idx file, plain or `.gz`.

    An uncompressed file of 8-bit numbers is memory-mapped, read-only. Any other is read, or
    decompressed, straight into the array, without a second copy.

    Raises:
        DataError: a file that is no idx file, is cut off, or continues behind its end; the message
            names the byte.
    """
    path = Path(path)
    with open_decompressed(path) as stream:
        header = _header(path, stream)
        dtype = np.dtype(header.type)
        size = math.prod(header.shape) * dtype.itemsize
        file_size = os.path.getsize(path)
        if path.suffix != ".gz":
            _check_size(path, header, size, file_size - header.bytes)
            if dtype.itemsize == 1 and size:
                return np.memmap(path, dtype, "r", header.bytes, header.shape)
        elif size > file_size * MAX_DEFLATE_RATIO:  # reject the file before allocating memory
            raise DataError(
                f"{path} claims at byte 4 to hold {_by(header.shape)} numbers, which its "
                f"{file_size} packed bytes cannot hold. It is damaged or no idx file: get it again."
            )
        array = np.empty(header.shape, dtype)
        found = read_into(stream, array.reshape(-1).view("u1").data) if size else 0
        _check_size(path, header, size, found + len(stream.read(1)))
    return array.astype(dtype.newbyteorder("="), copy=False)


class _Header(NamedTuple):
    type: str
    shape: tuple[int, ...]
    bytes: int


def _header(path: Path, stream: io.BufferedIOBase) -> _Header:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not magic[3]:
        raise DataError(
            f"{path} should be an idx file, which begins with 00 00, a type and a number of dims; "
            f"at byte 0 it has {magic.hex(' ') or 'nothing'}. Give the intended file, such as "
            f"train-images-idx3-ubyte; a file packed by gzip is named .gz."
        )
    dims = magic[3]
    shape = stream.read(4 * dims)
    if len(shape) < 4 * dims:
        raise DataError(
            f"{path} should have the sizes of {dims} dims and ends within them, at byte "
            f"{4 + len(shape)}. It was cut off: get it again."
        )
    return _Header(TYPES[magic[2]], struct.unpack(f">{dims}I", shape), 4 + 4 * dims)


def _check_size(path: Path, header: _Header, size: int, found: int) -> None:
    """Raise DataError unless `found`, the bytes behind the header, are those of the array."""
    end, shape = header.bytes + size, _by(header.shape)
    if found < size:
        raise DataError(
            f"{path} should hold {shape} numbers up to byte {end} and ends at byte "
            f"{header.bytes + found}. It was cut off: get it again."
        )
    if found > size:
        raise DataError(
            f"{path} should hold {shape} numbers up to byte {end} and continues behind it. It is "
            f"another file, or two in one: get it again."
        )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
