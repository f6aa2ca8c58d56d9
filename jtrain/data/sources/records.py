"""Records of TFRecord and ArrayRecord files by index, and the features of tf.train.Example."""

import abc
import functools
import logging
import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np

from jtrain.data.sources.files import find_files
from jtrain.errors import DataError
from jtrain.io.regular_files import open_regular

Damaged: TypeAlias = Literal["stop", "skip"]
_log = logging.getLogger(__name__)


class Records(abc.ABC):
    """The records (bytes) of files by index, one file after the other.

    Args:
        paths: the files, as the user named them.
        counts: the number of records in each file.
        damaged: for a record that was changed `stop` raises; `skip` writes a line to the log
            `jtrain.data.sources.records` and returns the next valid record, so that every index
            still has a record, and always the same record.

    Raises:
        DataError: if there is no record.
    """

    def __init__(self, paths: Any, counts: Iterable[int], damaged: Damaged = "stop"):
        self._first = np.cumsum([0, *counts])
        if not len(self):
            raise DataError(f"{paths} holds no record. Give at least one file with records in it.")
        self.damaged: Damaged = damaged
        self.skipped: dict[int, str] = {}
        """The damaged records that were read, and the error of each."""

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: SupportsIndex, /) -> bytes:
        index = index.__index__()
        if not 0 <= index < len(self):
            raise IndexError(f"Record {index} was requested of {len(self)}, counted from 0.")
        for place in (*range(index, len(self)), *range(index)):
            try:
                return self._read_index(place)
            except DataError as error:
                if self.damaged == "stop":
                    raise
                if place not in self.skipped:
                    self.skipped[place] = str(error)
                    _log.warning("skipped: %s", error)
        raise DataError(f"None of the {len(self)} records is valid. Get the files again.")

    def _read_index(self, index: int) -> bytes:
        file = int(np.searchsorted(self._first, index, "right")) - 1
        return self._read(file, index - int(self._first[file]))

    @abc.abstractmethod
    def _read(self, file: int, within: int) -> bytes:
        """Return record `within` of a file, both counted from 0.

        Raises:
            DataError: if the record was changed; the message has the file and the record.
        """


class ArrayRecords(Records):
    """The records (bytes) of ArrayRecord files, one file after the other: `len`, and by index.

    ```python
    rows = grain.MapDataset.source(ArrayRecords("train-*.arrayrecord")).map(read_example)
    source = GrainRows(rows)
    ```

    Write the files with one record a group (`ArrayRecordWriter(path, "group_size:1")`): each read
    of a record unpacks its complete group.

    Raises:
        DataError: a file that is cut off, damaged or of another format, when it is opened or read;
            or no record.

    Args:
        paths: files, a pattern, or a list of them.
        damaged: handling of a record that cannot be read; see `Records`.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], *, damaged: Damaged = "stop"):
        self.paths = find_files(paths)
        self._files = [_open_file(path) for path in self.paths]
        super().__init__(paths, map(len, self._files), damaged)

    def _read(self, file: int, within: int) -> bytes:
        try:
            return self._files[file][within]
        except RuntimeError as error:
            raise DataError(
                f"{self.paths[file]}: record {within} cannot be read ({error}). The file is "
                f"damaged: get it again, or skip such records: ArrayRecords(..., damaged='skip')."
            ) from error


def _open_file(path: Path) -> Any:
    from grain.sources import ArrayRecordDataSource  # imports JAX

    try:
        return ArrayRecordDataSource(str(path))
    except RuntimeError as error:
        raise DataError(
            f"{path} should be an ArrayRecord file with an index at its end, and has none at "
            f"byte {path.stat().st_size}, where it ends ({str(error) or 'no footer'}). "
            f"It is cut off or another file: get it again."
        ) from error


_POLYNOMIAL = 0x82F63B78  # bits reversed
_BLOCK = 512  # bytes, which need half a MiB of tables
_AT_ONCE = 64 * _BLOCK
_PLACES = np.arange(_BLOCK - 1, -1, -1, dtype=np.intp) * 256


def crc32c(data: bytes) -> int:
    """Return the checksum of RFC 3720, appendix B.4, that TFRecord and others use.

    The checksum is the exclusive or of one term for each byte and place. So the terms of all blocks
    are looked up at once, and the blocks are then combined one after the other.
    """
    tables, numbers, crc = _tables(), np.frombuffer(data, np.uint8), 0xFFFFFFFF
    short = len(numbers) % _BLOCK
    for byte in data[: short % 4]:
        crc = (crc >> 8) ^ int(tables[0, (crc ^ byte) & 0xFF])
    if short >= 4:
        crc = _combine(tables, crc, numbers[short % 4 : short].reshape(1, -1))
    for begin in range(short, len(numbers), _AT_ONCE):
        crc = _combine(tables, crc, numbers[begin : begin + _AT_ONCE].reshape(-1, _BLOCK))
    return crc ^ 0xFFFFFFFF


def _combine(tables: np.ndarray, crc: int, blocks: np.ndarray) -> int:  # blocks: n size
    """Return the checksum `crc` continued over the blocks."""
    size = blocks.shape[1]
    places = _PLACES[-size:]
    separate = np.bitwise_xor.reduce(tables.ravel().take(blocks + places[None]), axis=1)
    a, b, c, d = (tables[size - 1 - i] for i in range(4))
    for own in separate.tolist():  # the previous checksum enters the first four bytes
        previous = a[crc & 0xFF] ^ b[crc >> 8 & 0xFF] ^ c[crc >> 16 & 0xFF] ^ d[crc >> 24]
        crc = own ^ int(previous)
    return crc


@functools.cache
def byte_table() -> np.ndarray:  # uint32, 256
    """Return the CRC-32C of each single byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


@functools.cache
def _tables() -> np.ndarray:  # uint32, block 256
    """Return the term of each byte, by the number of bytes that follow in its block."""
    tables = np.empty((_BLOCK, 256), np.uint32)
    tables[0] = byte_table()
    for place in range(1, _BLOCK):
        before = tables[place - 1]
        tables[place] = (before >> np.uint32(8)) ^ tables[0][before & 0xFF]
    return tables


HEAD, TAIL = 12, 4  # a length and its checksum; the checksum of the data
_MASK = 0xA282EAD8  # added by TFRecord to each checksum


class TFRecords(Records):
    """The records (bytes) of TFRecord files, one file after the other: `len`, and by index.

    Grain can only stream these files. This class reads the lengths of all records once when a file
    is opened (1.5 us a record for a file in memory, measured) and maps the data, so that any record
    can be read and a batch stays a function of the step:

    ```python
    rows = grain.MapDataset.source(TFRecords("train-*.tfrecord")).map(read_example)
    source = GrainRows(rows)
    ```

    The checksum of every length is verified when a file is opened, so that a file that is cut off
    or of another format is noticed at once; the checksum of the data is verified when a record is
    read (5 us a kB). Files packed by gzip cannot be read by index.

    Args:
        paths: files, a pattern, or a list of them.
        damaged: handling of a record whose data was changed; see `Records`.

    Raises:
        DataError: a file that is cut off, of another format or packed, by its name and byte; or no
            record. On access, a record that is damaged.

    Source of the format: https://www.tensorflow.org/tutorials/load_data/tfrecord.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], *, damaged: Damaged = "stop"):
        self.paths = find_files(paths)
        self._files = [_mapped(path) for path in self.paths]
        # For each file, n 2: the start of each record's data, and its length.
        self._places = [_index_records(*file) for file in zip(self.paths, self._files, strict=True)]
        super().__init__(paths, map(len, self._places), damaged)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the mappings, which another process recreates."""
        return {name: value for name, value in vars(self).items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._files = [_mapped(path) for path in self.paths]

    def _read(self, file: int, within: int) -> bytes:
        begin, length = self._places[file][within].tolist()
        end = begin + length
        data, checksum = self._files[file][begin:end], self._files[file][end : end + TAIL]
        if _mask(crc32c(data)) != int.from_bytes(checksum, "little"):
            raise DataError(
                f"{self.paths[file]}: record {within}, at byte {begin - HEAD}, has data with "
                f"another checksum: it is damaged. Get the file again, or skip such records: "
                f"TFRecords(..., damaged='skip')."
            )
        return data


def _mapped(path: Path) -> mmap.mmap | bytes:
    with open_regular(path) as file:
        size = path.stat().st_size  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _index_records(path: Path, data: mmap.mmap | bytes) -> np.ndarray:  # int64, n 2
    """Return the start of each record's data, and its length."""
    if data[:2] == b"\x1f\x8b":
        raise DataError(
            f"{path} is packed by gzip, at byte 0, and records are read in place. "
            f"Unpack it: gunzip -k {path}"
        )
    places, sums, at, end = list[tuple[int, int]](), list[int](), 0, len(data)
    unpack = struct.Struct("<QI").unpack_from
    while at + HEAD <= end:
        length, checksum = unpack(data, at)
        places.append((at + HEAD, length))
        sums.append(checksum)
        at += HEAD + length + TAIL
        if at > end:
            break
    found_at = np.array(places, np.uint64).reshape(-1, 2)
    wrong = np.flatnonzero(_masked_crc(found_at[:, 1]) != np.array(sums, np.uint32))
    if len(wrong):
        record = int(wrong[0])
        raise DataError(
            f"{path} should be a TFRecord file; record {record}, at byte "
            f"{places[record][0] - HEAD}, begins with a length with another checksum. "
            f"It is damaged or another file: get it again."
        )
    if at != end:
        raise DataError(
            f"{path} should end with a complete record; record {len(places) - (at > end)}, the "
            f"last, is cut off at byte {end}. Get it again, or cut it: truncate -s "
            f"{places[-1][0] - HEAD if at > end else at} {path}"
        )
    return found_at.astype(np.int64)


def _masked_crc(lengths: np.ndarray) -> np.ndarray:  # uint64, n -> uint32, n
    """Return the checksum that TFRecord writes of each length: CRC-32C, rotated and masked."""
    crc = np.full(len(lengths), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(lengths.astype("<u8")).view(np.uint8).reshape(-1, 8).T:
        crc = byte_table()[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    return rotated + np.uint32(_MASK)


def _mask(crc: int) -> int:
    """Return TFRecord's mask of a checksum."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


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
