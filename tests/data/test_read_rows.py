"""Rows and records in files, and of Hugging Face: read, written, and what is damaged."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from image_files import framed, write_records

from jtrain.data import GrainRows, Shuffled
from jtrain.data.sources.foreign import HuggingFace
from jtrain.data.sources.parquet import ParquetRows
from jtrain.data.sources.records import HEAD, TAIL, ArrayRecords, TFRecords, read_example
from jtrain.data.sources.row_files import SUFFIXES, check_rows, encode_rows, read_rows
from jtrain.errors import DataError

ROW = lambda dtype, *shape: SimpleNamespace(shape=shape, dtype=np.dtype(dtype))
BOTH = {"x": ROW("float32", 2), "n": ROW("int32")}
ONE = {"x": ROW("float32", 2)}
X = np.float32([[0.1, -2], [3e-8, 4], [5, 6]])
N = np.int32([3, -1, 7])


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in SUFFIXES if kind != ".npy"])
def test_what_is_written_is_read_back_to_the_same_bits(kind: str):
    path = Path(f"rows{kind}")
    path.write_bytes(encode_rows(path, {"x": X, "n": N, "other": N}))
    found = check_rows(read_rows(path, BOTH), BOTH, "it")
    np.testing.assert_array_equal(found["x"], X)
    np.testing.assert_array_equal(found["n"], N)


def test_an_array_without_a_name_is_the_only_one_that_is_wanted():
    path = Path("rows.npy")
    path.write_bytes(encode_rows(path, {"output": X}))
    np.testing.assert_array_equal(read_rows(path, ONE)["x"], X)
    with pytest.raises(DataError, match=r"has an array without a name, .*give a \.npz"):
        read_rows(path, BOTH)


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n3,4\n", "x.1,label,x.0\n2,9,1\n4,9,3\n", "\ufeffx.0,x.1\r\n1,2\r\n\r\n3,4"]
)
def test_columns_are_found_by_name_or_are_all_columns(text: str):
    Path("rows.csv").write_text(text)
    np.testing.assert_array_equal(read_rows(Path("rows.csv"), ONE)["x"], [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("file", "content", "wanted", "words"),
    [
        ("rows.csv", "a,b,c\n1,2,3\n", ONE, r"lacks x\.0, x\.1, and has a, b, c: x float32"),
        ("rows.csv", "x.0,x.1\n1,2,3\n", ONE, r"rows\.csv:2: 3 values, and the first line has 2"),
        ("rows.csv", "x.0,x.1,x.0\n1,2,3\n", ONE, r"rows\.csv:1: two columns are named x\.0: give"),
        ("rows.jsonl", '{"x": [1]}\n', ONE, r"x is int64 of shape \[1\], and numbers of"),
    ],
)  # fmt: skip
def test_errors_in_a_file_are_reported(file: str, content, wanted, words: str):
    Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words):
        read_rows(Path(file), wanted)


@pytest.mark.parametrize(
    ("array", "row", "words"),
    [
        (N + 0.5, ROW("int32"), r"as int32, and it is float64: give whole numbers"),
        (np.int64([2**40]), ROW("int32"), "give whole numbers that fit int32"),
        (np.int8([1]), ROW("float32"), "bytes: training scaled them"),
        (X[:, :1], ROW("float32", 2), r"of shape \[n, 2\], and it is \[3, 1\]: give an array"),
    ],
)
def test_rows_of_another_type_or_shape_are_refused(array, row, words: str):
    with pytest.raises(DataError, match=words):
        check_rows({"n": array}, {"n": row}, "it")


@pytest.mark.parametrize(
    ("first", "doubtful"),
    [
        ([2001, 2002, 2005, 2010, 2011, 2012, 2020, 2024], True),
        (range(8), True),
        ([0.5, 3, 0.25, 4, 5, 1, 0.5, 8], False),
    ],
)
def test_a_first_line_that_may_be_a_header_is_asked_about(first, doubtful: bool):
    path, wanted = Path("rows.csv"), {"x": ROW("float32", 8)}
    rows = np.random.default_rng(0).normal(size=(30, 8)).round(3).tolist()
    path.write_text("\n".join(",".join(map(str, row)) for row in [[*first], *rows]))
    if doubtful:
        with pytest.raises(DataError, match="--header no, or --header yes"):
            read_rows(path, wanted)
    else:
        assert read_rows(path, wanted)["x"].tolist() == [[*first], *rows]
    assert len(read_rows(path, wanted, header=False)["x"]) == 31
    if len(set(first)) == 8:
        assert read_rows(path, wanted, header=True)["x"].tolist() == rows


ROWS = 50
IMAGES = np.random.default_rng(0).random((ROWS, 2, 3), np.float32)
COLUMNS = {
    "image": IMAGES.tolist(),
    "label": [row % 7 for row in range(ROWS)],
    "flag": [row % 2 == 0 for row in range(ROWS)],
    "name": [f"row {row}" for row in range(ROWS)],
    "ragged": [[1] * (row % 3) for row in range(ROWS)],
    "holed": [None if row == 9 else 1.5 for row in range(ROWS)],
}
NUMBERS = ["image", "label", "flag"]


def write_parquet(path: Path, columns: dict) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=8)
    return path


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """Write the rows to two files, in groups of 8."""
    for name, part in (("a", slice(0, 30)), ("b", slice(30, None))):
        columns = {column: values[part] for column, values in COLUMNS.items()}
        arrow = pytest.importorskip("pyarrow")
        of = arrow.list_(arrow.list_(arrow.float32()))
        columns["image"] = arrow.array(columns["image"], of)
        write_parquet(tmp_path / f"{name}.parquet", columns)
    return str(tmp_path / "*.parquet")


@pytest.mark.slow
def test_rows_of_parquet_are_those_that_were_written(parquet: str):
    rows = ParquetRows(parquet, columns=NUMBERS, keep=1)
    for indices in (np.arange(ROWS), np.random.default_rng(0).integers(0, ROWS, 40)):
        got = rows[indices]
        np.testing.assert_array_equal(got["image"], IMAGES[indices], strict=True)
        np.testing.assert_array_equal(got["label"], np.array(COLUMNS["label"])[indices])
        np.testing.assert_array_equal(got["flag"], np.array(COLUMNS["flag"])[indices], strict=True)
    assert len(rows._cache) == 1


@pytest.mark.slow
def test_a_row_of_parquet_has_its_strings(parquet: str):
    rows = ParquetRows(parquet)
    assert rows[41] == {name: values[41] for name, values in COLUMNS.items()} | {
        "image": IMAGES[41].astype(np.float64).tolist()
    }
    decoded = grain.MapDataset.source(rows).map(lambda row: {"size": len(row["name"])})
    assert GrainRows(decoded)[np.array([3, 41])]["size"].tolist() == [5, 6]
    with pytest.raises(IndexError, match="50 was requested of 50"):
        rows[50]


@pytest.mark.slow
def test_a_file_of_parquet_that_is_cut_off_is_refused_with_its_end(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"x": list(range(99))})
    kept = int(path.stat().st_size * 0.99)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"a\.parquet .* ends at byte {kept} without"):
        ParquetRows(path)


@pytest.mark.slow
def test_rows_of_hugging_face_are_those_that_were_given(table):
    rows = HuggingFace(table(COLUMNS), columns=NUMBERS)
    indices = np.random.default_rng(0).integers(0, ROWS, 40)
    got = rows[indices]
    np.testing.assert_array_equal(got["image"].astype(np.float32), IMAGES[indices])
    np.testing.assert_array_equal(got["label"], np.array(COLUMNS["label"])[indices])
    got["label"][:] = 0
    assert rows[indices]["label"].any(), "changing a batch does not change the data"
    assert len(Shuffled(rows, size=16)[0]["flag"]) == 16


@pytest.fixture
def table():
    """Return a function that makes a data set of columns, with a format."""
    datasets = pytest.importorskip("datasets")

    def make(columns, kind=None, names=(), options=None, every=False):
        rows, options = datasets.Dataset.from_dict(columns), options or {}
        if kind == "custom":
            return rows.with_transform(**options)
        return rows.with_format(
            kind, columns=list(names) or None, output_all_columns=every, **options
        )

    return make


@pytest.mark.slow
def test_a_transform_makes_the_rows(table):
    columns = {"x": [1.0, 2.0, 3.0], "text": ["a", "b", "c"]}
    make = lambda transform: table(columns, "custom", options={"transform": transform})
    double = lambda rows: {"z": [np.full(2, 2 * x) for x in rows["x"]], "text": rows["text"]}
    rows = HuggingFace(make(double), columns=["z"])
    assert rows[np.array([2, 0])]["z"].tolist() == [[6, 6], [2, 2]]
    for transform, names, says in (
        (double, ["text"], "'text' should hold numbers and holds str.*columns="),
        (lambda rows: {"z": rows["x"][1:]}, [], "given 2 rows and returned 1 of 'z'.*dataset.map"),
    ):
        with pytest.raises(DataError, match=says):
            HuggingFace(make(transform), columns=names)[np.array([2, 0])]


@pytest.mark.slow
def test_a_format_decides_the_columns_and_the_dtype(table):
    columns = {"x": [1.0, 2.0, 3.0], "y": [1, 2, 3]}
    rows = HuggingFace(table(columns, "numpy", ["x"], {"dtype": np.float16}))
    assert {name: x.dtype for name, x in rows[np.arange(2)].items()} == {"x": np.float16}
    assert rows.columns == ["x"]
    assert HuggingFace(table(columns, "numpy", ["x"], every=True)).columns == ["x", "y"]
    assert HuggingFace(table(columns, "pandas", ["y"]))[np.array([2])]["y"].tolist() == [3]


@pytest.mark.slow
@pytest.mark.parametrize("values", [[1.0, None, 3.0], [[1, 2], [None, 2], [3, 4]]])
def test_none_is_found_by_column_and_row_when_it_is_read(table, values):
    rows = HuggingFace(table({"x": values, "y": [0, 1, 2]}))
    assert np.array_equal(rows[np.array([2, 0])]["x"], [values[2], values[0]])
    with pytest.raises(DataError, match="'x' has None in row 1 of the data set") as caught:
        rows[np.array([2, 1])]
    advice = re.search(r"filter\((lambda row: .*)\), or", str(caught.value))
    assert advice is not None
    complete = list(filter(eval(advice[1]), [{"x": value} for value in values]))
    assert [row["x"] for row in complete] == [values[0], values[2]]


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


NUMBERED = [np.full(3, row, np.int32).tobytes() for row in range(20)]


def write_array_records(path: Path, records: list[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_records_by_index_are_those_that_were_written(tmp_path: Path):
    write_array_records(tmp_path / "a.arrayrecord", NUMBERED[:7])
    write_array_records(tmp_path / "b.arrayrecord", NUMBERED[7:])
    records = ArrayRecords(str(tmp_path / "*.arrayrecord"))
    order = np.random.default_rng(0).permutation(20)
    assert [records[i] for i in order] == [NUMBERED[i] for i in order]
    for outside in (20, -1):
        with pytest.raises(IndexError, match=f"Record {outside} was requested of 20"):
            records[outside]


def test_a_file_that_is_cut_off_is_refused_with_its_end(tmp_path: Path):
    path = write_array_records(tmp_path / "a.arrayrecord", NUMBERED)
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
