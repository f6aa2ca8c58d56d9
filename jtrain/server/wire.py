"""Frames between the processes of a parameter server: a header, JSON, and raw arrays.

A frame is `JTP1`, the length of the JSON (4 bytes), that of the arrays (8 bytes), the JSON, and
the arrays one after the other, in the byte order of the machine. Nothing is unpickled: the JSON
holds the name of a request, its fields, and dtype and shape of each array.

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
from typing import Any

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
    """Buffers for the arrays of frames; one is used again when no array lies in it any more."""

    def __init__(self):
        self._buffers: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """Return `size` bytes at a multiple of 64, with any contents."""
        if size < SMALL:
            return _aligned(np.empty(size + ALIGNMENT, np.uint8), size)
        space = size + ALIGNMENT
        with self._lock:
            count = range(len(self._buffers))
            unused = [i for i in count if _references(self._buffers, i) == _UNUSED]
            fits = [i for i in unused if space <= len(self._buffers[i]) <= 2 * space]
            if fits:
                return _aligned(self._buffers[fits[0]], size)
            if unused:  # for messages of another size
                del self._buffers[unused[0]]
            self._buffers.append(np.empty(space, np.uint8))
            return _aligned(self._buffers[-1], size)


def _aligned(buffer: np.ndarray, size: int) -> np.ndarray:
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size]


def _references(buffers: list[np.ndarray], index: int) -> int:
    """Return the references to a buffer: every view of it, however it was made, is one."""
    return sys.getrefcount(buffers[index])


_UNUSED = _references([np.empty(1, np.uint8)], 0)


MAGIC = b"JTP1"
MOST_JSON = 1 << 20  # bytes
_HEADER = struct.Struct("<4sIQ")
_INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
DTYPES = {name: np.dtype(name) for name in ["bool", *_INTEGERS, "float16", "float32", "float64"]}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


class WireError(ConnectionError):
    """A frame is not what this version sends."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A request or a reply."""

    name: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()
    frame_bytes: int = dataclasses.field(default=0, compare=False)
    """Bytes of the frame that it came in; 0 where it was made here."""


def encode(message: Message) -> list[memoryview]:
    """Return the bytes of a frame: its header with JSON, and each array, which is not copied."""
    described = [[array.dtype.name, list(np.shape(array))] for array in message.arrays]
    text = json.dumps([message.name, dict(message.fields), described]).encode()
    arrays = [np.ascontiguousarray(array) for array in message.arrays if array.nbytes]
    header = _HEADER.pack(MAGIC, len(text), sum(array.nbytes for array in arrays))
    buffers = [array.reshape(-1).view(np.uint8).data for array in arrays]
    return [memoryview(header + text), *buffers]


def send(connection: socket.socket, message: Message) -> None:
    """Send a message."""
    for buffer in encode(message):
        connection.sendall(buffer)


def receive(connection: socket.socket, most: int, pool: BufferPool | None = None) -> Message:
    """Receive a message with at most `most` bytes of arrays.

    Raises:
        OSError: if the connection is lost, or the peer has closed it.
        WireError: if the frame is malformed or too large.
    """
    header = bytearray(_HEADER.size)
    _fill(connection, memoryview(header))
    magic, text_size, size = _HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError("the peer is not a parameter server of this version of jtrain")
    if text_size > MOST_JSON or size > most:
        raise WireError(
            f"a frame of {text_size} + {size} bytes is over the limit of {MOST_JSON} + {most}"
        )
    text = bytearray(text_size)
    _fill(connection, memoryview(text))
    try:
        name, fields, described = json.loads(text)
        types = [(DTYPES[dtype], _check_shape(shape)) for dtype, shape in described]
        if not isinstance(name, str) or not isinstance(fields, dict):
            raise ValueError("its JSON is not a request")
        arrays = _allocate(types, size, pool or BufferPool())
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise WireError(f"a frame is malformed: {error!r}") from None
    for array in arrays:
        if array.nbytes:
            _fill(connection, array.reshape(-1).view(np.uint8).data)
    return Message(name, fields, arrays, frame_bytes=_HEADER.size + text_size + size)


def _check_shape(shape: Any) -> list[int]:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"an array of shape {shape!r}")
    return shape


def _allocate(
    types: Sequence[tuple[np.dtype, list[int]]], size: int, pool: BufferPool
) -> list[np.ndarray]:
    """Return arrays of `size` bytes in all that lie in one buffer, each aligned for JAX."""
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in types]
    if sum(sizes) != size:
        raise ValueError(f"{size} bytes hold arrays of {sum(sizes)}")
    spaces = (-(-each // ALIGNMENT) * ALIGNMENT for each in sizes)
    starts = list(itertools.accumulate(spaces, initial=0))
    buffer = pool.take(starts[-1])
    return [
        buffer[start : start + each].view(dtype).reshape(shape)
        for start, each, (dtype, shape) in zip(starts, sizes, types, strict=False)
    ]


def _fill(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer from the connection."""
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            raise WireError("the connection was cut off")
        done += count
