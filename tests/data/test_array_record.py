"""ArrayRecord files by index, against what their writer was given."""

from pathlib import Path

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jtrain.data import GrainRows, Shuffled
from jtrain.data.sources.records import ArrayRecords
from jtrain.errors import DataError

RECORDS = [np.full(3, row, np.int32).tobytes() for row in range(20)]


def write_records(path: Path, records: list[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_records_by_index_are_those_that_were_written(tmp_path: Path):
    write_records(tmp_path / "a.arrayrecord", RECORDS[:7])
    write_records(tmp_path / "b.arrayrecord", RECORDS[7:])
    records = ArrayRecords(str(tmp_path / "*.arrayrecord"))
    order = np.random.default_rng(0).permutation(20)
    assert [records[i] for i in order] == [RECORDS[i] for i in order]
    for outside in (20, -1):
        with pytest.raises(IndexError, match=f"Record {outside} was requested of 20"):
            records[outside]


def test_batches_are_functions_of_the_step(tmp_path: Path):
    records = ArrayRecords(write_records(tmp_path / "a.arrayrecord", RECORDS))
    rows = grain.MapDataset.source(records).map(lambda r: {"x": np.frombuffer(r, np.int32)})
    batches = Shuffled(GrainRows(rows), size=5)
    assert sorted(x for step in range(4) for x in batches[step]["x"][:, 2]) == list(range(20))
    np.testing.assert_array_equal(batches[3]["x"], batches[3]["x"])


@pytest.mark.parametrize("share", [0.0, 0.4, 0.999])
def test_a_file_that_is_cut_off_is_refused_with_its_end(share: float, tmp_path: Path):
    path = write_records(tmp_path / "a.arrayrecord", RECORDS)
    kept = int(path.stat().st_size * share)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"a\.arrayrecord .* byte {kept}, where it ends"):
        ArrayRecords(path)


def test_a_foreign_file_is_refused(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG" * 40_000)
    with pytest.raises(DataError, match=r"a\.png should be an ArrayRecord file"):
        ArrayRecords(tmp_path / "a.png")


def test_a_damaged_record_is_reported_by_file_and_place(tmp_path: Path):
    path = write_records(tmp_path / "a.arrayrecord", RECORDS)
    data = bytearray(path.read_bytes())
    place = data.index(RECORDS[5]) if RECORDS[5] in data else 300
    data[place] ^= 0xFF
    path.write_bytes(data)
    records = ArrayRecords(path)
    with pytest.raises(DataError, match=r"a\.arrayrecord: record \d+ .* at byte \d+"):
        [records[index] for index in range(20)]
