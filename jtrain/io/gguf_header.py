"""Header of a GGUF file: its metadata, and where its tensors are; it takes little memory.

The reader of the package `gguf` makes an array of every number and every text, and follows counts
beyond the end of a file. Here a count is compared with the file, and long values are skipped.
"""

import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.regular_files import open_regular

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
TEXT, ARRAY = 8, 9
MOST = 1 << 16  # keys, and tensors
SHORT = 1 << 10  # bytes of a name, and bytes or numbers of a value that is not skipped
LISTED = 1 << 22  # texts of a list, and bytes of one


class TensorInfo(NamedTuple):
    """Where a tensor is: `first` counts bytes from the end of the header."""

    shape: tuple[int, ...]
    kind: int
    first: int


class Header(NamedTuple):
    """The header of a file; a longer text or list than `SHORT` is None: see `read_value`."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    skipped: dict[str, tuple[int, int]]  # type and place of each value that is None
    end: int


def read_header(data: np.ndarray) -> Header:
    """Read the header of a mapped file.

    Raises:
        ValueError: if it is broken, or has more than `MOST` keys or tensors.
    """
    at = _Cursor(data)
    version = at.number("I") if at.take(4) == b"GGUF" else 0
    if version not in (2, 3):
        raise ValueError(f"it begins with {bytes(data[:8])!r}, not with GGUF and version 2 or 3")
    tensors, keys = at.count(MOST, 24), at.count(MOST, 13)
    metadata, infos, skipped = {}, {}, {}
    for _ in range(keys):
        name, kind = at.text(), at.number("I")
        if name in metadata:
            raise ValueError(f"{name} is there twice")
        place = at.place
        metadata[name] = at.value(kind)
        if metadata[name] is None:
            skipped[name] = kind, place
    for _ in range(tensors):
        name = at.text()
        shape = tuple(at.number("Q") for _ in range(min(at.number("I"), 9)))
        if name in infos or len(shape) > 4 or math.prod(shape) > 1 << 50:
            raise ValueError(f"the tensor {name} is there twice, or has the shape {shape}")
        infos[name] = TensorInfo(shape[::-1], at.number("I"), at.number("Q"))
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align.bit_count() != 1:
        raise ValueError(f"general.alignment is {align!r}, no power of two")
    return Header(metadata, infos, skipped, -(-at.place // align) * align)


def read_value(data: np.ndarray, header: Header, name: str) -> Any:
    """Return a value of the header, whole; None if there is none of this name.

    Raises:
        ValueError: if it has more than `LISTED` texts, or a text of more bytes.
    """
    if name not in header.skipped:
        return header.metadata.get(name)
    kind, place = header.skipped[name]
    return _Cursor(data, place).value(kind, whole=True)


def map_bytes(path: Path) -> np.ndarray:
    """Map a regular file as bytes.

    Raises:
        CheckpointError: if it cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return np.memmap(file, np.uint8, "r") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Name another file."
        ) from None


class _Cursor:
    """A place in a file, which moves behind what is read."""

    def __init__(self, data: np.ndarray, place: int = 0):
        self.data, self.place = data, place

    def take(self, size: int) -> bytes:
        return self.data[self._pass(size) : self.place].tobytes()

    def _pass(self, size: int) -> int:
        first, self.place = self.place, self.place + size
        if self.place > len(self.data):
            raise ValueError(f"its header goes to byte {self.place:,} of {len(self.data):,}")
        return first

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(np.dtype(f"<{code}").itemsize))[0]

    def count(self, most: int, size: int) -> int:
        """Return a count of things of at least `size` bytes."""
        found = self.number("Q")
        if found > min(most, (len(self.data) - self.place) // size):
            raise ValueError(f"it counts {found:,} things in {len(self.data):,} bytes")
        return found

    def text(self, most: int = SHORT) -> str:
        size = self.number("Q")
        if size > most:
            raise ValueError(f"a text of {size:,} bytes where at most {most:,} are expected")
        return self.take(size).decode(errors="replace")

    def value(self, kind: int, *, whole: bool = False) -> Any:
        """Return a value of this type, numbers as an array; None if it is long and not `whole`."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            if whole:
                return self.text(LISTED)
            first = self._pass(size := self.number("Q"))
            return self.data[first : self.place].tobytes().decode() if size <= SHORT else None
        of = self.number("I") if kind == ARRAY else kind
        if kind == ARRAY and of == TEXT:
            count = self.count(LISTED, 8)
            if whole:
                return [self.text(LISTED) for _ in range(count)]
            for _ in range(count):
                self._pass(self.number("Q"))
            return None
        if kind != ARRAY or of not in SCALARS:
            raise ValueError(f"a value of the type {of}, which is not a number, text or list")
        dtype = np.dtype(f"<{SCALARS[of]}")
        count = self.count(len(self.data), dtype.itemsize)
        first = self._pass(count * dtype.itemsize)
        return self.data[first : self.place].view(dtype) if whole or count <= SHORT else None
