"""Features of `tf.train.Example`, the content of most TFRecord files; without TensorFlow."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from jtrain.errors import DataError

Feature: TypeAlias = np.ndarray | list[bytes]
VARINT, EIGHT_BYTES, COUNTED, FOUR_BYTES = 0, 1, 2, 5  # wire types


def read_example(record: bytes) -> dict[str, Feature]:
    """Return the features of a serialized Example by name: float32 n, int64 n, or a list of bytes.

    Raises:
        DataError: bytes that are not an Example.

    Source: https://protobuf.dev/programming-guides/encoding/, and example.proto and feature.proto
    of https://github.com/tensorflow/tensorflow/tree/master/tensorflow/core/example.
    """
    try:
        return {
            name: feature
            for _, features in _fields(memoryview(record), {1})
            for _, entry in _fields(features, {1})
            for name, feature in [_parse_entry(entry)]
        }
    except _ForeignError as error:
        raise DataError(
            f"A record of {len(record)} bytes should be a tf.train.Example and is not ({error}); "
            f"it begins with {record[:8].hex(' ') or 'nothing'}. In place of read_example, map it "
            f"by its own format: lambda record: {{'x': np.frombuffer(record, 'uint8')}}."
        ) from error


class _ForeignError(Exception):
    """An encoding that an Example does not have."""


def _parse_entry(entry: memoryview) -> tuple[str, Feature]:
    """Return a feature's name and its values."""
    parts = dict(_fields(entry, {1, 2}))
    name = bytes(parts.get(1, b"")).decode("utf-8", "replace")
    feature: Feature = []
    for kind, values in _fields(parts.get(2, memoryview(b"")), {1, 2, 3}):
        if kind == 1:
            feature = [bytes(value) for _, value in _fields(values, {1})]
        else:
            packed = b"".join(value for _, value in _fields(values, {1}))
            feature = _floats(packed) if kind == 2 else _integers(packed)
    return name, feature


def _fields(message: memoryview, allowed: set[int]) -> Iterator[tuple[int, memoryview]]:
    """Yield each field of a message: its number, and the bytes of its value."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if number not in allowed:
            raise _ForeignError(f"field {number}, where an Example has {sorted(allowed)}")
        if kind == COUNTED:
            length, at = _varint(message, at)
        elif kind == VARINT:
            length = _varint(message, at)[1] - at
        else:
            length = {FOUR_BYTES: 4, EIGHT_BYTES: 8}.get(kind, len(message))
        if at + length > len(message):
            raise _ForeignError(f"a field of {length} bytes, where {len(message) - at} are left")
        yield number, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return an integer of 7 bits a byte, and the place behind it."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise _ForeignError("a whole number without an end")


def _floats(packed: bytes) -> np.ndarray:  # float32, n
    if len(packed) % 4:
        raise _ForeignError(f"{len(packed)} bytes of floats of 4")
    return np.frombuffer(packed, "<f4").astype(np.float32)


def _integers(packed: bytes) -> np.ndarray:  # int64, n
    """Return integers of 7 bits a byte, the last byte of each below 128."""
    data = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise _ForeignError("a whole number without an end")
    if not len(data):
        return np.empty(0, np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    places = np.arange(len(data)) - np.repeat(starts, np.diff(starts, append=len(data)))
    bits = (data & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)
