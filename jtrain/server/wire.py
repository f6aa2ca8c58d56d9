"""Frames between the processes of a parameter server: a header, JSON, and raw arrays.

A frame is `JTPS`, the version (2 bytes), the length of the JSON (4 bytes), the length of the arrays
(8 bytes), the JSON, and the arrays one after the other, in the byte order of the machine. Nothing
is unpickled: the JSON holds the name of a request, its fields, and dtype and shape of each array.
"""

import dataclasses
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

MAGIC, VERSION = b"JTPS", 1
MOST_JSON = 1 << 20  # bytes
_HEADER = struct.Struct("<4sHIQ")
_INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
_DTYPES = {name: np.dtype(name) for name in ["bool", *_INTEGERS, "float16", "float32", "float64"]}
_DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


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

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message; no array is copied."""
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    described = [[array.dtype.name, list(np.shape(array))] for array in message.arrays]
    text = json.dumps([message.name, dict(message.fields), described]).encode()
    header = _HEADER.pack(MAGIC, VERSION, len(text), message.num_bytes)
    connection.sendall(header + text)
    for array in arrays:
        if array.nbytes:
            connection.sendall(array.reshape(-1).view(np.uint8).data)


def receive(connection: socket.socket, most: int) -> Message:
    """Receive a message with at most `most` bytes of arrays.

    Raises:
        EOFError: if the peer has closed the connection.
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
    arrays = [_empty(*each) for each in described]
    if sum(array.nbytes for array in arrays) != size:
        raise WireError(f"a frame of {size} bytes describes arrays of another size")
    for array in arrays:
        if array.nbytes:
            _fill(connection, array.reshape(-1).view(np.uint8).data)
    return Message(name, fields, arrays)


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


def _empty(dtype: str, shape: list[int]) -> np.ndarray:
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    if known is None or not sizes or len(shape) > 32:
        raise WireError(f"a frame has an array {dtype!r} of shape {shape!r}")
    count = 1
    for n in shape:
        count *= n
    if count * known.itemsize > 1 << 40:
        raise WireError(f"a frame has an array of shape {shape}")
    return _aligned(count * known.itemsize).view(known).reshape(shape)


def _aligned(size: int) -> np.ndarray:
    """Return bytes at a multiple of 64, which JAX takes without a copy on the CPU."""
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size]


def _fill(connection: socket.socket, view: memoryview, *, begins: bool = False) -> None:
    """Fill a buffer from the connection."""
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError if begins and not done else WireError("a frame was cut off")
        done += count
