"""Rows in files of four kinds: read, written, and their errors."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jtrain.data.sources.read_rows import SUFFIXES, check_rows, read_rows
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
        ("rows.jsonl", '{"x": [1]}\n', ONE, r"x has shape \[1\], and \[2\] is wanted: write"),
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
    ],
)
def test_types_that_would_change_numbers_are_refused(array, row, words: str):
    with pytest.raises(DataError, match=words):
        check_rows({"n": array}, {"n": row}, "it")


@pytest.mark.parametrize(
    ("first", "is_header"),
    [
        ([2001, 2002, 2005, 2010, 2011, 2012, 2020, 2024], True),
        (range(8), True),
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
