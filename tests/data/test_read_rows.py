"""Rows in files of four kinds: read, written, and their errors."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jtrain.data.sources.read_rows import SUFFIXES, read_rows
from jtrain.data.sources.row_shapes import check_rows
from jtrain.data.sources.write_rows import encode_rows
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
    "text",
    [
        "1,2\n3,4\n",
        "a,b\n1,2\n3,4\n",
        "x.0,x.1\n1,2\n3,4\n",
        "x.1,label,x.0\n2,9,1\n4,9,3\n",
        "\ufeffx.0,x.1\r\n1,2\r\n\r\n3,4",
        '"x.0","x.1"\n1.0,2e0\n3,4\n',
    ],
)
def test_columns_are_found_by_name_or_are_all_columns(text: str):
    Path("rows.csv").write_text(text)
    np.testing.assert_array_equal(read_rows(Path("rows.csv"), ONE)["x"], [[1, 2], [3, 4]])


def test_a_line_of_json_is_an_object_or_the_only_array():
    for rows in ([{"x": [1, 2], "y": "?"}, {"x": [3, 4]}], [[1, 2], [3, 4]]):
        Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        np.testing.assert_array_equal(read_rows(Path("rows.jsonl"), ONE)["x"], [[1, 2], [3, 4]])


def test_numbers_that_are_not_finite_and_truths_are_written_as_others_read_them():
    arrays = {"x": np.float32([np.nan, np.inf, 1]), "b": np.array([True, False, True])}
    assert encode_rows(Path("y.csv"), arrays).decode() == "x,b\nnan,1\ninf,0\n1.0,1\n"
    lines = encode_rows(Path("y.jsonl"), arrays).decode().splitlines()
    assert [json.loads(line)["x"] for line in lines] == ["NaN", "Infinity", 1.0]


@pytest.mark.parametrize(
    ("file", "content", "wanted", "words"),
    [
        ("rows.csv", "a,b,c\n1,2,3\n", ONE, r"lacks x\.0, x\.1, and has a, b, c: x float32"),
        ("rows.csv", "1,2,3\n", ONE, "has 3 columns without names"),
        ("rows.csv", "x.0,x.1\n1,2\n", BOTH, r"lacks n, and has x\.0, x\.1"),
        ("rows.csv", "x.0,x.1\n1,2,3\n", ONE, r"rows\.csv:2: 3 values, and the first line has 2"),
        ("rows.csv", "x.0,x.1\n1,two\n", ONE, r"rows\.csv:2: x\.1 is 'two', no number"),
        ("rows.csv", "1,2\n1,\n", ONE, r"rows\.csv:2: column 2 is '', no number"),
        ("rows.csv", "x.0,x.1\n", ONE, "has no rows: give at least one"),
        ("rows.csv", "x.0,x.1,x.0\n1,2,3\n", ONE, r"rows\.csv:1: two columns are named x\.0: give"),
        ("rows.csv", "", ONE, "has no rows"),
        ("rows.csv", b"\xff\xfe\x00", ONE, r"is not UTF-8 text: save it as UTF-8, or give a \.npz"),
        ("rows.jsonl", '{"x": [1, 2]\n', ONE, r"rows\.jsonl:1: .* is no JSON: .*\{\"x\": \[0, "),
        ("rows.jsonl", '{"x": [1, 2]}\n{"y": 1}\n', ONE, r"jsonl:2: x is missing; found y: write"),
        ("rows.jsonl", '{"x": [1]}\n', ONE, r"x has shape \[1\], and \[2\] is wanted: write"),
        ("rows.jsonl", '{"x": [[1], [2, 3]]}\n', ONE, "x is no array of numbers"),
        ("rows.jsonl", '{"x": ["a", "b"]}\n', ONE, "x is no array of numbers"),
        ("rows.jsonl", "[1, 2]\n", BOTH, r"has an array without a name"),
        ("rows.jsonl", "[" * 100000, ONE, "is no JSON"),
        ("rows.npz", b"PK\x03\x04 cut", ONE, r"cannot be read: .*np\.savez"),
        ("rows.npz", b"", ONE, r"cannot be read: .*np\.savez"),
        ("rows.npy", b"\x93NUMPY\x01\x00", ONE, r"cannot be read: .*np\.save"),
        ("rows.npy", b"cos\nsystem\n(S'true'\ntR.", ONE, "is not.*NUMPY"),
        ("rows.txt", "1 2", ONE, r"ends with \.txt, and rows are read from .* such as rows\.npz"),
        ("rows", "1 2", ONE, "ends with nothing"),
    ],
)  # fmt: skip
def test_errors_in_a_file_are_reported(file: str, content, wanted, words: str):
    Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words):
        read_rows(Path(file), wanted)


def test_a_folder_and_a_missing_file_are_reported():
    Path("rows.npz").mkdir()
    for file in ("rows.npz", "no.csv"):
        with pytest.raises(DataError, match=r"cannot be read \(.*\): give the path of a file"):
            read_rows(Path(file), ONE)


@pytest.mark.parametrize(
    ("array", "row", "words"),
    [
        (N + 0.5, ROW("int32"), r"as int32, and it is float64: give whole numbers"),
        (np.int64([2**40]), ROW("int32"), "give whole numbers that fit int32"),
        (np.array([True]), ROW("int32"), r"astype\('int32'\)"),
        (np.array([None]), ROW("int32"), "give numbers"),
        (np.int8([1]), ROW("float32"), "bytes: training scaled them"),
        (np.array(3), ROW("int32"), r"n\[None\] for a single row"),
    ],
)
def test_types_that_would_change_numbers_are_refused(array, row, words: str):
    with pytest.raises(DataError, match=words):
        check_rows({"n": array}, {"n": row}, "it")


def test_types_that_change_no_number_are_accepted():
    found = check_rows({"n": np.float64([3, 4])}, {"n": ROW("int32")}, "it")["n"]
    assert found.dtype == np.int32
    assert check_rows({"n": N}, {"n": ROW("float32")}, "it")["n"].dtype == np.float32


def test_an_array_may_have_any_name():
    arrays = {"file": N, "allow_pickle": N + 1}
    Path("rows.npz").write_bytes(encode_rows(Path("rows.npz"), arrays))
    with np.load("rows.npz", allow_pickle=False) as found:
        assert set(found.files) == set(arrays)
        np.testing.assert_array_equal(found["allow_pickle"], N + 1)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("0,1", r"csv:1: 0, 1 \.\.\. 1 may be a row, or the names of the columns: --header no"),
        ("NA,1", r"csv:1: 'NA' stands beside numbers.*a name for each column"),
        (",1", r"csv:1: '' stands beside numbers"),
        ("2001,2002", "--header no, or --header yes"),
    ],
)
def test_a_first_line_that_may_be_a_header_or_a_row_is_refused(first: str, message: str):
    path = Path("rows.csv")
    path.write_text(f"{first}\n5.5,6\n")
    with pytest.raises(DataError, match=message):
        read_rows(path, ONE)
    assert read_rows(path, ONE, header=True)["x"].tolist() == [[5.5, 6]]
    if first[0] not in "N,":
        rows = read_rows(path, ONE, header=False)["x"].tolist()
        assert rows == [[*map(float, first.split(","))], [5.5, 6]]


@pytest.mark.parametrize(
    ("first", "is_header"),
    [
        (range(400, 480, 10), True),
        ([2001, 2002, 2005, 2010, 2011, 2012, 2020, 2024], True),
        ([0.9, 0.8, 0.75, 0.5, 0.4, 0.3, 0.2, 0.1], True),
        ([17, 3, 99, 4, 56, 1, 2, 8], True),
        (range(8), True),
        ([0] * 8, False),
        ([0.5, 3, 0.25, 4, 5, 1, 0.5, 8], False),
    ],
)
def test_a_header_of_numbers_is_decided_and_said(first, is_header: bool, caplog):
    path, wanted = Path("rows.csv"), {"x": ROW("float32", 8)}
    rows = np.random.default_rng(0).normal(size=(30, 8)).round(3).tolist()
    path.write_text("\n".join(",".join(map(str, row)) for row in [[*first], *rows]))
    found = read_rows(path, wanted)["x"]
    assert found.tolist() == (rows if is_header else [[*first], *rows])
    assert ("--header no" in caplog.text) == is_header
    assert len(read_rows(path, wanted, header=False)["x"]) == 31
    if len(set(first)) == 8:
        assert read_rows(path, wanted, header=True)["x"].tolist() == rows


def test_numbers_outside_the_range_of_their_columns_are_no_row_without_a_word():
    rows = np.random.default_rng(0).uniform(size=(9, 2)).round(3).tolist()
    for first, says in (([700, 400], "--header no"), ([0.5, 0.2], None), ([700, 0.2], None)):
        text = "\n".join(",".join(map(str, row)) for row in [first, *rows])
        Path("rows.csv").write_text(text)
        if says is None:
            assert read_rows(Path("rows.csv"), ONE)["x"].tolist() == [first, *rows]
            continue
        with pytest.raises(DataError, match=says):
            read_rows(Path("rows.csv"), ONE)


def test_a_table_in_utf_16_is_read():
    Path("rows.csv").write_text("x.0,x.1\n1,2\n", encoding="utf-16")
    assert read_rows(Path("rows.csv"), ONE)["x"].tolist() == [[1, 2]]
    Path("rows.csv").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"is Parquet by its first bytes.*python3 -c"):
        read_rows(Path("rows.csv"), ONE)
