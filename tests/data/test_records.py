"""Records in TFRecord and ArrayRecord files, the Examples in them, and damage."""

import logging
import sys
from pathlib import Path

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from image_files import framed, write_records

from jtrain.data.sources.records import (
    HEAD,
    TAIL,
    ArrayRecords,
    TFRecords,
    masked_checksum,
    read_example,
)
from jtrain.errors import DataError

RECORDS = [bytes(np.random.default_rng(size).bytes(size)) for size in (5, 0, 300, 1, 70)]


def example_type():
    """Build the class tf.train.Example from its published description."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", syntax="proto3", package="tf")
    field = descriptor_pb2.FieldDescriptorProto
    lists = (("Bytes", field.TYPE_BYTES), ("Float", field.TYPE_FLOAT), ("Int64", field.TYPE_INT64))

    def add(message, name, number, kind, *, of="", many=False):
        label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        message.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)

    for name, kind in lists:
        add(file.message_type.add(name=f"{name}List"), "value", 1, kind, many=True)
    feature = file.message_type.add(name="Feature")
    for number, (name, _) in enumerate(lists, 1):
        of = f".tf.{name}List"
        add(feature, f"{name.lower()}_list", number, field.TYPE_MESSAGE, of=of)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field.TYPE_STRING)
    add(entry, "value", 2, field.TYPE_MESSAGE, of=".tf.Feature")
    of = ".tf.Features.FeatureEntry"
    add(features, "feature", 1, field.TYPE_MESSAGE, of=of, many=True)
    add(file.message_type.add(name="Example"), "features", 1, field.TYPE_MESSAGE, of=".tf.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


Example = example_type()


def example(**features) -> bytes:
    made = Example()
    for name, values in features.items():
        feature = made.features.feature[name]
        if isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        elif isinstance(values[0], float):
            feature.float_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return made.SerializeToString()


def test_records_by_index_are_those_that_grain_streams(tmp_path: Path):
    path = write_records(tmp_path / "one.tfrecord", RECORDS)
    records = TFRecords(path)
    assert [records[i] for i in range(len(records))] == RECORDS
    assert list(grain.experimental.TFRecordIterDataset(str(path))) == RECORDS


def test_features_are_those_that_protobuf_wrote():
    got = read_example(
        example(
            image=[b"\x89PNG", b""],
            box=[0.25, -1.5e30, float("inf")],
            label=[0, 1, 127, 128, -1, 2**63 - 1, -(2**63)],
            **{"caf\u00e9": [7]},
        )
    )
    assert got["image"] == [b"\x89PNG", b""]
    np.testing.assert_array_equal(
        got["box"], np.array([0.25, -1.5e30, np.inf], np.float32), strict=True
    )
    assert got["label"].tolist() == [0, 1, 127, 128, -1, 2**63 - 1, -(2**63)]
    assert got["caf\u00e9"].tolist() == [7]


@pytest.mark.parametrize("kept", [1, 37, 59, 204, 395])
def test_a_file_that_is_cut_off_anywhere_is_refused_and_the_advice_works(kept, tmp_path: Path):
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    data = path.read_bytes()
    ends = np.cumsum([len(framed(record)) for record in RECORDS]).tolist()
    assert kept < len(data) == 456 > 400
    path.write_bytes(data[:kept])
    if kept in ends:
        assert len(TFRecords(path)) == ends.index(kept) + 1
        return
    with pytest.raises(DataError, match=rf"is cut off at byte {kept}\. .*truncate -s") as caught:
        TFRecords(path)
    path.write_bytes(data[: int(str(caught.value).split("truncate -s ")[1].split()[0])])
    whole = sum(end <= kept for end in ends)
    if whole:
        assert len(TFRecords(path)) == whole


@pytest.mark.parametrize(
    "record", [b"\x12\x03abc", b"\x0a\x03\x12\x01x", b"plain text", b"\x0a\x05\x0a\x03\x18\x01"]
)
def test_a_record_that_is_no_example_is_refused(record: bytes):
    with pytest.raises(DataError, match=r"In place of read_example"):
        read_example(record)


def test_tfrecord_files_without_their_package_say_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    masked_checksum.cache_clear()
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    with pytest.raises(DataError, match=r"pip install 'jtrain\[tfrecord\]'"):
        TFRecords(path)


NUMBERS = [np.full(3, row, np.int32).tobytes() for row in range(20)]


def write_array_records(path: Path, records: list[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_records_by_index_are_those_that_were_written(tmp_path: Path):
    write_array_records(tmp_path / "a.arrayrecord", NUMBERS[:7])
    write_array_records(tmp_path / "b.arrayrecord", NUMBERS[7:])
    records = ArrayRecords(str(tmp_path / "*.arrayrecord"))
    order = np.random.default_rng(0).permutation(20)
    assert [records[i] for i in order] == [NUMBERS[i] for i in order]
    for outside in (20, -1):
        with pytest.raises(IndexError, match=f"Record {outside} was requested of 20"):
            records[outside]


def test_a_file_that_is_cut_off_is_refused_with_its_end(tmp_path: Path):
    path = write_array_records(tmp_path / "a.arrayrecord", NUMBERS)
    kept = int(path.stat().st_size * 0.4)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"a\.arrayrecord .* byte {kept}, where it ends"):
        ArrayRecords(path)


RANDOM = [bytes(np.random.default_rng(size).bytes(size)) for size in (5, 30, 300, 1, 70)]


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_each_flipped_bit_of_a_record_is_reported_by_file_and_record(tmp_path: Path):
    path = write_records(tmp_path / "a.tfrecord", RANDOM)
    whole, begin, record = path.read_bytes(), len(framed(RANDOM[0])), 1
    last = len(framed(RANDOM[record]))
    for bit in range(8 * HEAD, 8 * last):
        flipped(path, 8 * begin + bit)
        records = TFRecords(path)
        assert [records[i] for i in (0, 2, 3, 4)] == [RANDOM[i] for i in (0, 2, 3, 4)]
        with pytest.raises(DataError, match=rf"a\.tfrecord: record 1, at byte {begin}, .*checksum"):
            records[record]
        path.write_bytes(whole)
    assert last == HEAD + len(RANDOM[record]) + TAIL
    assert TFRecords(path)[record] == RANDOM[record]


def test_damaged_records_are_skipped_on_request(tmp_path: Path, caplog):
    path = write_records(tmp_path / "a.tfrecord", RANDOM)
    begins = np.cumsum([0, *(len(framed(record)) for record in RANDOM)])
    for damaged in (2, 4):
        flipped(path, 8 * (int(begins[damaged]) + HEAD))
    records = TFRecords(path, damaged="skip")
    with caplog.at_level(logging.WARNING, "jtrain.data.sources.records"):
        for _ in range(2):
            found = [records[i] for i in range(5)]
            assert found == [RANDOM[i] for i in (0, 1, 3, 3, 0)]
    assert sorted(records.skipped) == [2, 4]
    assert len(caplog.messages) == 2, "each is told once"
    assert all("a.tfrecord: record" in line for line in caplog.messages)
    for damaged in (0, 1, 3):
        flipped(path, 8 * (int(begins[damaged]) + HEAD))
    with pytest.raises(DataError, match="None of the 5 records is valid"):
        TFRecords(path, damaged="skip")[0]
