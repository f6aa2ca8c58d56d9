"""Records in TFRecord and ArrayRecord files, the Examples in them, and damage."""

import logging
from pathlib import Path

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from image_files import framed, write_records

from jtrain.data.sources.records import (
    HEAD,
    TAIL,
    ArrayRecords,
    TFRecords,
    read_example,
)
from jtrain.errors import DataError

RECORDS = [bytes(np.random.default_rng(size).bytes(size)) for size in (5, 0, 300, 1, 70)]


# As TensorFlow writes an Example of these features, from its published description.
EXAMPLE = bytes.fromhex(
    "0a6f0a130a05696d616765120a0a080a0489504e470a000a0e0a05636166c3a912051a030a01070a170a03626f78"
    "1210120e0a0c0000803e177697f10000807f0a2f0a056c6162656c12261a240a2200017f8001ffffffffffffffff"
    "ff01ffffffffffffffff7f80808080808080808001"
)


def test_records_by_index_are_those_that_grain_streams(tmp_path: Path):
    path = write_records(tmp_path / "one.tfrecord", RECORDS)
    records = TFRecords(path)
    assert [records[i] for i in range(len(records))] == RECORDS
    assert list(grain.experimental.TFRecordIterDataset(str(path))) == RECORDS


def test_features_are_those_that_were_written():
    got = read_example(EXAMPLE)
    assert got["image"] == [b"\x89PNG", b""]
    box = np.array([0.25, -1.5e30, np.inf], np.float32)
    np.testing.assert_array_equal(got["box"], box, strict=True)
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


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_each_flipped_bit_of_a_record_is_reported_by_file_and_record(tmp_path: Path):
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    whole, last = path.read_bytes(), len(framed(RECORDS[0]))
    for bit in range(8 * HEAD, 8 * last):
        flipped(path, bit)
        records = TFRecords(path)
        assert [records[i] for i in range(1, 5)] == RECORDS[1:]
        with pytest.raises(DataError, match=r"a\.tfrecord: record 0, at byte 0, .*checksum"):
            records[0]
        path.write_bytes(whole)
    assert last == HEAD + len(RECORDS[0]) + TAIL
    assert TFRecords(path)[0] == RECORDS[0]


def test_damaged_records_are_skipped_on_request(tmp_path: Path, caplog):
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    begins = np.cumsum([0, *(len(framed(record)) for record in RECORDS)])
    for damaged in (2, 4):
        flipped(path, 8 * (int(begins[damaged]) + HEAD))
    records = TFRecords(path, damaged="skip")
    with caplog.at_level(logging.WARNING, "jtrain.data.sources.records"):
        for _ in range(2):
            found = [records[i] for i in range(5)]
            assert found == [RECORDS[i] for i in (0, 1, 3, 3, 0)]
    assert sorted(records.skipped) == [2, 4]
    assert len(caplog.messages) == 2, "each is told once"
    assert all("a.tfrecord: record" in line for line in caplog.messages)
    for damaged in (0, 1, 3):
        flipped(path, 8 * (int(begins[damaged]) + HEAD))
    with pytest.raises(DataError, match="None of the 5 records is valid"):
        TFRecords(path, damaged="skip")[0]
