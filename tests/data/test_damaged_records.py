"""Damaged records: reported by file and record, or skipped."""

import logging
from pathlib import Path

import numpy as np
import pytest
from image_files import crc32c as bit_by_bit
from image_files import framed, write_records
from test_array_record import write_records as write_array_records

from jtrain.data.sources.records import ArrayRecords
from jtrain.data.sources.tfrecord import HEAD, TAIL, TFRecords, crc32c
from jtrain.errors import DataError

RECORDS = [bytes(np.random.default_rng(size).bytes(size)) for size in (5, 30, 300, 1, 70)]


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("data", "sum_"),
    [  # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
    ids=["noughts", "ones", "up", "down", "digits"],
)
def test_the_checksum_is_that_of_the_standard(data: bytes, sum_: int):
    assert crc32c(data) == sum_


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 511, 512, 513, 515, 1024, 4097, 40_000])
def test_the_checksum_is_that_of_its_definition(count: int):
    data = np.random.default_rng(count).bytes(count)
    assert crc32c(data) == bit_by_bit(data)


def test_each_flipped_bit_of_a_record_is_reported_by_file_and_record(tmp_path: Path):
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    whole, begin, record = path.read_bytes(), len(framed(RECORDS[0])), 1
    last = len(framed(RECORDS[record]))
    for bit in range(8 * HEAD, 8 * last):
        flipped(path, 8 * begin + bit)
        records = TFRecords(path)
        assert [records[i] for i in (0, 2, 3, 4)] == [RECORDS[i] for i in (0, 2, 3, 4)]
        with pytest.raises(DataError, match=rf"a\.tfrecord: record 1, at byte {begin}, .*checksum"):
            records[record]
        path.write_bytes(whole)
    assert last == HEAD + len(RECORDS[record]) + TAIL
    assert TFRecords(path)[record] == RECORDS[record]


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


@pytest.mark.thorough
def test_flipped_bits_of_an_array_record_are_reported_or_harmless(tmp_path: Path):
    """Flip bits: the format's checksums find them, or no record changes."""
    wrote = [np.random.default_rng(row).bytes(200) for row in range(12)]
    path = write_array_records(tmp_path / "a.arrayrecord", wrote)
    whole, told = path.read_bytes(), 0
    for bit in np.random.default_rng(0).integers(0, 8 * len(whole), 60):
        flipped(path, int(bit))
        for row in range(12):
            found, error = outcome(path, row)
            assert found == wrote[row] or "a.arrayrecord" in error
            told += bool(error)
        path.write_bytes(whole)
    assert told


def outcome(path: Path, row: int) -> tuple[bytes, str]:
    """Return the record, or the error message."""
    try:
        return ArrayRecords(path)[row], ""
    except DataError as error:
        return b"", str(error)


def test_a_damaged_array_record_is_skipped_on_request(tmp_path: Path):
    wrote = [np.random.default_rng(row).bytes(5000) for row in range(4)]
    path = write_array_records(tmp_path / "a.arrayrecord", wrote)
    flipped(path, 8 * path.read_bytes().index(wrote[1][2000:2020]))
    with pytest.raises(DataError, match=r"a\.arrayrecord: record 1 .*damaged='skip'"):
        ArrayRecords(path)[1]
    records = ArrayRecords(path, damaged="skip")
    assert [records[i] for i in range(4)] == [wrote[0], wrote[2], wrote[2], wrote[3]]
    assert list(records.skipped) == [1]
