"""Frames between the processes of a parameter server: a header, JSON, and raw arrays.

A frame is `JTPS`, the version (2 bytes), the length of the JSON (4 bytes), the length of the arrays
(8 bytes), the JSON, and the arrays one after the other, in the byte order of the machine. Nothing
is unpickled: the JSON holds the name of a request, its fields, and dtype and shape of each array.

The memory of large messages is used again, since new pages cost more than their contents: 100 MB of
new pages of 4 KB take 30 ms, and of 2 MB 10 ms; to copy 100 MB takes 8 ms.
"""

import dataclasses
import itertools
import json
import math
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
SMALL = 1 << 20  # bytes; malloc has smaller blocks at hand
ALIGNMENT = 64  # bytes at which JAX takes an array of numpy without a copy, on the CPU


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process whose malloc asks the kernel for pages of 2 MB.

    XLA allocates what an update needs anew each time. glibc 2.35 or newer reads the variable;
    others ignore it. A choice that is made in `environ` stands.
    """
    chosen = environ.get(TUNABLES, "")
    if "glibc.malloc.hugetlb" in chosen:
        return {}
    return {TUNABLES: f"{chosen}:{HUGE_PAGES}" if chosen else HUGE_PAGES}


class BufferPool:
    """Buffers for the arrays of frames; one is used again when no array lies in it any more.

    A pool has as many buffers as were in use at once.
    """

    def __init__(self):
        self._buffers: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """Return `size` bytes at a multiple of 64, with any contents."""
        if size < SMALL:
            return _aligned(np.empty(size + ALIGNMENT, np.uint8), size)
        space = size + ALIGNMENT
        with self._lock:
            unused = [i for i in range(len(self._buffers)) if self._is_unused(i)]
            fits = [i for i in unused if space <= len(self._buffers[i]) <= 2 * space]
            if fits:
                return _aligned(self._buffers[fits[0]], size)
            if unused:  # for messages of another size
                del self._buffers[unused[0]]
            self._buffers.append(np.empty(space, np.uint8))
            return _aligned(self._buffers[-1], size)

    def _is_unused(self, index: int) -> bool:
        return _references(self._buffers, index) == _UNUSED


def _aligned(buffer: np.ndarray, size: int) -> np.ndarray:
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size]


def _references(buffers: list[np.ndarray], index: int) -> int:
    """Return the references to a buffer: every view of it, however it was made, is one."""
    return sys.getrefcount(buffers[index])


_UNUSED = _references([np.empty(1, np.uint8)], 0)


MAGIC, VERSION = b"JTPS", 1
MOST_JSON = 1 << 20  # bytes
_HEADER = struct.Struct("<4sHIQ")
_INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
DTYPES = {name: np.dtype(name) for name in ["bool", *_INTEGERS, "float16", "float32", "float64"]}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


class WireError(ConnectionError):
    """A frame is not what this version sends."""


class VersionError(WireError):
    """The peer speaks another version."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A request or a reply."""

    name: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()
    frame_bytes: int = dataclasses.field(default=0, compare=False)
    """Bytes of the frame that it came in; 0 where it was made here."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


class Frame(NamedTuple):
    """Message as it is sent: its header with JSON, and its arrays."""

    head: bytes
    arrays: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole frame."""
        return len(self.head) + sum(array.nbytes for array in self.arrays)

    def send(self, connection: socket.socket) -> None:
        """Send it, without a copy of any array."""
        connection.sendall(self.head)
        for array in self.arrays:
            if array.nbytes:
                connection.sendall(array.reshape(-1).view(np.uint8).data)


def frame_of(message: Message) -> Frame:
    """Return a message as it is sent."""
    described = [[array.dtype.name, list(np.shape(array))] for array in message.arrays]
    text = json.dumps([message.name, dict(message.fields), described]).encode()
    header = _HEADER.pack(MAGIC, VERSION, len(text), message.num_bytes)
    return Frame(header + text, [np.ascontiguousarray(array) for array in message.arrays])


def send(connection: socket.socket, message: Message) -> int:
    """Send a message; return the bytes of its frame."""
    frame = frame_of(message)
    frame.send(connection)
    return frame.num_bytes


def receive(connection: socket.socket, most: int, pool: BufferPool | None = None) -> Message:
    """Receive a message with at most `most` bytes of arrays.

    Args:
        pool: where the arrays lie.

    Raises:
        OSError: if the connection is lost, or the peer has closed it.
        WireError: if the frame is malformed or too large.
        VersionError: if the peer has another version.
    """
    header = bytearray(_HEADER.size)
    _fill(connection, memoryview(header), begins=True)
    magic, version, text_size, size = _HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError("the peer is no parameter server of jtrain")
    if version != VERSION:
        raise VersionError(
            f"the peer speaks version {version} of the parameter server's frames, and this process "
            f"version {VERSION}. Install one version of jtrain for all of them."
        )
    if text_size > MOST_JSON or size > most:
        raise WireError(
            f"a frame of {text_size} + {size} bytes is over the limit of {MOST_JSON} + {most}"
        )
    text = bytearray(text_size)
    _fill(connection, memoryview(text))
    name, fields, described = _parse(bytes(text))
    known = [_array_type(*each) for each in described]
    if sum(each.num_bytes for each in known) != size:
        raise WireError(f"a frame of {size} bytes describes arrays of another size")
    arrays = _allocate(known, pool or BufferPool())
    for array in arrays:
        if array.nbytes:
            _fill(connection, array.reshape(-1).view(np.uint8).data)
    return Message(name, fields, arrays, frame_bytes=_HEADER.size + text_size + size)


def _parse(text: bytes) -> tuple[str, dict[str, Any], list[tuple[str, list[int]]]]:
    try:
        name, fields, described = json.loads(text)
        well_formed = isinstance(name, str) and isinstance(fields, dict)
        described = [(dtype, shape) for dtype, shape in described]
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a frame's JSON is malformed: {error}") from None
    if not well_formed:
        raise WireError("a frame's JSON is no request")
    return name, fields, described


class _ArrayType(NamedTuple):
    dtype: np.dtype
    shape: list[int]
    num_bytes: int


def _array_type(dtype: str, shape: list[int]) -> _ArrayType:
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None
    sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    if known is None or not sizes or len(shape) > 32:
        raise WireError(f"a frame has an array {dtype!r} of shape {shape!r}")
    if known.itemsize * math.prod(n or 1 for n in shape) > 1 << 40:  # numpy's limit counts no 0
        raise WireError(f"a frame has an array of shape {shape}")
    return _ArrayType(known, shape, known.itemsize * math.prod(shape))


def _allocate(types: Sequence[_ArrayType], pool: BufferPool) -> list[np.ndarray]:
    """Return arrays that lie in one buffer, each aligned for JAX."""
    spaces = [-(-each.num_bytes // ALIGNMENT) * ALIGNMENT for each in types]
    ends = list(itertools.accumulate(spaces))
    buffer = pool.take(ends[-1] if ends else 0)
    return [
        buffer[end - space :][: each.num_bytes].view(each.dtype).reshape(each.shape)
        for each, space, end in zip(types, spaces, ends, strict=True)
    ]


def _fill(connection: socket.socket, view: memoryview, *, begins: bool = False) -> None:
    """Fill a buffer from the connection."""
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            if begins and not done:
                raise ConnectionError("the peer has closed the connection")
            raise WireError("a frame was cut off")
        done += count
