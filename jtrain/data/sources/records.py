"""Records of TFRecord (`jtrain[tfrecord]`) and ArrayRecord files, and tf.train.Example."""

import abc
import functools
import logging
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np

from jtrain.data.sources.files import find_files
from jtrain.data.sources.source import import_optional
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
    read (50 ns a kB). Files packed by gzip cannot be read by index.

    Args:
        paths: files, a pattern, or a list of them.
        damaged: handling of a record whose data was changed; see `Records`.

    Raises:
        DataError: a file that is cut off, of another format or packed, by its name and byte; no
            record; or google-crc32c is not installed. On access, a record that is damaged.

    Source of the format: https://www.tensorflow.org/tutorials/load_data/tfrecord.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], *, damaged: Damaged = "stop"):
        self.paths = find_files(paths)
        checksum = masked_checksum()
        self._files = [_mapped(path) for path in self.paths]
        # For each file, n 2: the start of each record's data, and its length.
        self._places = [
            _index_records(path, data, checksum)
            for path, data in zip(self.paths, self._files, strict=True)
        ]
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
        if masked_checksum()(data) != int.from_bytes(checksum, "little"):
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


def _index_records(
    path: Path, data: mmap.mmap | bytes, checksum: Callable[[bytes], int]
) -> np.ndarray:  # int64, n 2
    """Return the start of each record's data, and its length."""
    if data[:2] == b"\x1f\x8b":
        raise DataError(
            f"{path} is packed by gzip, at byte 0, and records are read in place. "
            f"Unpack it: gunzip -k {path}"
        )
    places, at, end = list[tuple[int, int]](), 0, len(data)
    unpack = struct.Struct("<QI").unpack_from
    while at + HEAD <= end:
        length, found = unpack(data, at)
        if found != checksum(data[at : at + 8]):
            raise DataError(
                f"{path} should be a TFRecord file; record {len(places)}, at byte {at}, begins "
                f"with a length with another checksum. It is damaged or another file: get it again."
            )
        if at + HEAD + length + TAIL > end:
            break
        places.append((at + HEAD, length))
        at += HEAD + length + TAIL
    if at != end:
        raise DataError(
            f"{path} should end with a complete record; record {len(places)}, the last, is cut "
            f"off at byte {end}. Get it again, or cut it: truncate -s {at} {path}"
        )
    return np.array(places, np.int64).reshape(-1, 2)


@functools.cache
def masked_checksum() -> Callable[[bytes], int]:
    """Return the function for the checksum that TFRecord writes: CRC-32C, rotated and masked.

    Raises:
        DataError: if google-crc32c is not installed.
    """
    crc32c = import_optional("google_crc32c", "tfrecord", "A TFRecord file").value

    def checksum(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF

    return checksum


Feature: TypeAlias = np.ndarray | list[bytes]


def read_example(record: bytes) -> dict[str, Feature]:
    """Return the features of a serialized Example by name: float32 n, int64 n, or a list of bytes.

    Raises:
        DataError: bytes that are not an Example.
    """
    from google.protobuf.message import DecodeError

    try:
        example = _example_type().FromString(record)
        size = example.ByteSize()
        example.DiscardUnknownFields()
        if example.ByteSize() != size:
            raise DecodeError("it has fields that an Example does not have")
    except DecodeError as error:
        raise DataError(
            f"A record of {len(record)} bytes should be a tf.train.Example and is not ({error}); "
            f"it begins with {record[:8].hex(' ') or 'nothing'}. In place of read_example, map it "
            f"by its own format: lambda record: {{'x': np.frombuffer(record, 'uint8')}}."
        ) from error
    features = example.features.feature
    return {each.key.decode("utf-8", "replace"): _values(each.value) for each in features}


def _values(feature: Any) -> Feature:
    if feature.HasField("float_list"):
        return np.array(feature.float_list.value, np.float32)
    if feature.HasField("int64_list"):
        return np.array(feature.int64_list.value, np.int64)
    return list(feature.bytes_list.value)


@functools.cache
def _example_type() -> Any:
    """Return the class of tf.train.Example.

    Source: example.proto and feature.proto of
    https://github.com/tensorflow/tensorflow/tree/master/tensorflow/core/example. The entries of the
    map of features are a list of messages here, which are the same bytes.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    many, one = field.LABEL_REPEATED, field.LABEL_OPTIONAL
    bytes_, message = field.TYPE_BYTES, field.TYPE_MESSAGE
    messages = {
        "BytesList": [("value", bytes_, None, many)],
        "FloatList": [("value", field.TYPE_FLOAT, None, many)],
        "Int64List": [("value", field.TYPE_INT64, None, many)],
        "Feature": [
            ("bytes_list", message, ".jt.BytesList", one),
            ("float_list", message, ".jt.FloatList", one),
            ("int64_list", message, ".jt.Int64List", one),
        ],
        "Entry": [("key", bytes_, None, one), ("value", message, ".jt.Feature", one)],
        "Features": [("feature", message, ".jt.Entry", many)],
        "Example": [("features", message, ".jt.Features", one)],
    }
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="jt", syntax="proto3")
    for title, fields in messages.items():
        added = file.message_type.add(name=title)
        for number, (name, kind, of, label) in enumerate(fields, 1):
            added.field.add(name=name, number=number, type=kind, type_name=of, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jt.Example"))
