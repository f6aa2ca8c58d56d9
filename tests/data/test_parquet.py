"""Rows of Parquet files and of Hugging Face data sets, against the written values."""

import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import grain
import numpy as np
import pytest

from jtrain.data import GrainRows, Shuffled
from jtrain.data.sources.hugging_face import HuggingFace
from jtrain.data.sources.parquet import ParquetRows
from jtrain.errors import DataError

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


@pytest.mark.parametrize(
    ("module", "extra", "source"),
    [("pyarrow", "parquet", ParquetRows), ("datasets", "hf", HuggingFace)],
)
def test_a_missing_package_is_reported_with_its_pip_command(
    module, extra, source, tmp_path, monkeypatch
):
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # simulate a missing package
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=rf"needs {module}, .*pip install 'jtrain\[{extra}\]'"):
        source(str(tmp_path / "a.parquet"))
    assert f"\n{extra} = [" in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def write_parquet(path: Path, columns: dict, *, group: int = 8) -> Path:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        arrow.table(columns), path, row_group_size=group
    )
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


@pytest.fixture
def dataset():
    return pytest.importorskip("datasets").Dataset.from_dict(COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 1 << 30], ids=["nothing kept", "all kept"])
def test_rows_of_parquet_are_those_that_were_written(parquet: str, keep: int):
    rows = ParquetRows(parquet, columns=NUMBERS, keep=keep)
    for indices in (np.arange(ROWS), np.random.default_rng(0).integers(0, ROWS, 40)):
        got = rows[indices]
        np.testing.assert_array_equal(got["image"], IMAGES[indices], strict=True)
        np.testing.assert_array_equal(got["label"], np.array(COLUMNS["label"])[indices])
        np.testing.assert_array_equal(got["flag"], np.array(COLUMNS["flag"])[indices], strict=True)
    assert len(rows._cache) == (1 if keep == 1 else 7)


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
@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("name", r"'name' should hold numbers and holds string.*GrainRows"),
        ("ragged", r"'ragged' has lists of 0 and of 2 in row group \d of .*GrainRows"),
        ("holed", r"'holed' .* row group 1 of .*a\.parquet has a row without one.*fillna"),
        ("none", r"'none' was requested, and .*a\.parquet has image, label"),
    ],
)
def test_a_column_of_parquet_without_numbers_is_reported(column: str, says: str, parquet: str):
    with pytest.raises(DataError, match=says):
        ParquetRows(parquet, columns=["label", column])[np.arange(ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_of_parquet_that_is_cut_off_is_refused_with_its_end(share: float, tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"x": list(range(99))})
    kept = int(path.stat().st_size * share)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"a\.parquet .* ends at byte {kept} without"):
        ParquetRows(path)


@pytest.mark.slow
def test_a_damaged_page_of_parquet_is_reported(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"x": list(range(999))}, group=999)
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 40 + data[44:])
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 .* damaged"):
        ParquetRows(path)[np.arange(9)]


@pytest.mark.slow
def test_parquet_files_of_two_sets_are_reported(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", {"x": [1]})
    write_parquet(tmp_path / "b.parquet", {"y": [1]})
    with pytest.raises(DataError, match=r"a\.parquet has x int64 and .*b\.parquet y int64"):
        ParquetRows(str(tmp_path / "*.parquet"))
    write_parquet(tmp_path / "c.parquet", {"x": []})
    with pytest.raises(DataError, match="holds no row"):
        ParquetRows(tmp_path / "c.parquet")


@pytest.mark.slow
def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table([[1, 2], [3, 4], [5, 6]], names=["x", "y", "x"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    for columns in ([], ["x"], ["y", "x"]):
        with pytest.raises(DataError, match=r"columns are named 'x'.*columns=\['y'\]"):
            ParquetRows(tmp_path / "a.parquet", columns=columns)
    rows = ParquetRows(tmp_path / "a.parquet", columns=["y"])
    assert rows[np.arange(2)]["y"].tolist() == [3, 4]


@pytest.mark.slow
def test_rows_of_hugging_face_are_those_that_were_given(dataset):
    rows = HuggingFace(dataset, columns=NUMBERS)
    indices = np.random.default_rng(0).integers(0, ROWS, 40)
    got = rows[indices]
    np.testing.assert_array_equal(got["image"].astype(np.float32), IMAGES[indices])
    np.testing.assert_array_equal(got["label"], np.array(COLUMNS["label"])[indices])
    got["label"][:] = 0
    assert rows[indices]["label"].any(), "changing a batch does not change the data"
    assert len(Shuffled(rows, size=16)[0]["flag"]) == 16


@pytest.mark.slow
def test_images_of_hugging_face_are_arrays():
    datasets, pil = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    pictures = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), np.uint8)
    given = {"image": [pil.fromarray(picture) for picture in pictures]}
    features = datasets.Features({"image": datasets.Image()})
    rows = HuggingFace(datasets.Dataset.from_dict(given, features=features))
    np.testing.assert_array_equal(rows[np.array([2, 0])]["image"], pictures[[2, 0]], strict=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("name", r"'name' should hold numbers and holds str.*dataset\.map"),
        ("ragged", r"'ragged' has \(0,\) and \(1,\)\. .*dataset\.map\(crop_or_pad\)"),
        ("none", r"'none' was requested, and the data set has image, label"),
    ],
)
def test_a_column_of_hugging_face_without_numbers_is_reported(column: str, says: str, dataset):
    with pytest.raises(DataError, match=says):
        HuggingFace(dataset, columns=["label", column])[np.arange(5)]


@pytest.mark.slow
def test_a_data_set_without_a_split_of_hugging_face_is_reported(dataset):
    splits = pytest.importorskip("datasets").DatasetDict(train=dataset, test=dataset)
    with pytest.raises(DataError, match=r"has train, test\. Choose: HuggingFace\(dataset\['train'"):
        HuggingFace(splits)
    with pytest.raises(DataError, match="IterableDataset can only be streamed"):
        HuggingFace(dataset.to_iterable_dataset())


class Table:
    """A stand-in of a `datasets.Dataset`: formats, a transform, and nulls."""

    def __init__(self, columns: dict, kind: str | None = None, names=(), options=None, every=False):
        self.columns, self.column_names = columns, list(columns)
        self.format = {
            "type": kind,
            "format_kwargs": options or {},
            "columns": list(names) or self.column_names,
            "output_all_columns": every,
        }
        self.data = self

    def column(self, name: str) -> SimpleNamespace:
        values = self.columns[name]
        inner = [x for each in values if isinstance(each, list) for x in each]
        part = SimpleNamespace(null_count=inner.count(None)) if inner else None
        return SimpleNamespace(chunks=[SimpleNamespace(null_count=values.count(None), values=part)])

    def with_format(self, kind, **options) -> "Table":
        return Table(self.columns, kind, options=options)

    def select_columns(self, names) -> "Table":
        return Table({name: self.columns[name] for name in names}, self.format["type"])

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, indices) -> dict:
        rows = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        if self.format["type"] == "custom":
            return self.format["format_kwargs"]["transform"](rows)
        dtype = self.format["format_kwargs"].get("dtype")
        return {n: np.array(x, dtype) if self.format["type"] else x for n, x in rows.items()}


@pytest.fixture(params=["stand-in", pytest.param("datasets", marks=pytest.mark.slow)])
def table(request, monkeypatch):
    """Return a function that makes a data set of columns, with a format."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Table))
        return Table
    datasets = pytest.importorskip("datasets")

    def make(columns, kind=None, names=(), options=None, every=False):
        rows, options = datasets.Dataset.from_dict(columns), options or {}
        if kind == "custom":
            return rows.with_transform(**options)
        return rows.with_format(
            kind, columns=list(names) or None, output_all_columns=every, **options
        )

    return make


def test_a_transform_makes_the_rows(table):
    columns = {"x": [1.0, 2.0, 3.0], "text": ["a", "b", "c"]}
    make = lambda transform: table(columns, "custom", options={"transform": transform})
    double = lambda rows: {"z": [np.full(2, 2 * x) for x in rows["x"]], "text": rows["text"]}
    rows = HuggingFace(make(double), columns=["z"])
    assert rows[np.array([2, 0])]["z"].tolist() == [[6, 6], [2, 2]]
    for transform, names, says in (
        (double, ["x"], r"'x' was requested, and .* has z, text\. Set columns=\['z', 'text'\]"),
        (double, ["text"], "'text' should hold numbers and holds str.*columns="),
        (lambda rows: {"z": rows["x"][1:]}, [], "given 2 rows and returned 1 of 'z'.*dataset.map"),
        (lambda rows: {"z": [[1], [1, 2]]}, [], r"'z' has \(1,\) and \(2,\).*dataset\.map"),
        (lambda rows: {"z": [1.0, None]}, [], "'z' should hold numbers and holds NoneType"),
    ):
        with pytest.raises(DataError, match=says):
            HuggingFace(make(transform), columns=names)[np.array([2, 0])]


def test_a_format_decides_the_columns_and_the_dtype(table):
    columns = {"x": [1.0, 2.0, 3.0], "y": [1, 2, 3]}
    rows = HuggingFace(table(columns, "numpy", ["x"], {"dtype": np.float16}))
    assert {name: x.dtype for name, x in rows[np.arange(2)].items()} == {"x": np.float16}
    assert rows.columns == ["x"]
    assert HuggingFace(table(columns, "numpy", ["x"], every=True)).columns == ["x", "y"]
    assert HuggingFace(table(columns, "pandas", ["y"]))[np.array([2])]["y"].tolist() == [3]


@pytest.mark.parametrize("values", [[1.0, None, 3.0], [1, None, 3], [[1, 2], [None, 2], [3, 4]]])
def test_none_is_found_by_column_and_row_when_it_is_read(table, values):
    rows = HuggingFace(table({"x": values, "y": [0, 1, 2]}))
    assert np.array_equal(rows[np.array([2, 0])]["x"], [values[2], values[0]])
    with pytest.raises(DataError, match="'x' has None in row 1 of the data set") as caught:
        rows[np.array([2, 1])]
    advice = re.search(r"filter\((lambda row: .*)\), or", str(caught.value))
    assert advice is not None
    complete = list(filter(eval(advice[1]), [{"x": value} for value in values]))
    assert [row["x"] for row in complete] == [values[0], values[2]]


MILLIONS = 40_000_000  # rows of 8 bytes, 320 MB, in a file of about 1 kB


def test_a_small_parquet_file_that_expands_to_gigabytes_is_refused_before_it_is_read(
    tmp_path: Path,
):
    arrow = pytest.importorskip("pyarrow")
    nulls = arrow.nulls(MILLIONS, arrow.int64())
    path = write_parquet(tmp_path / "bomb.parquet", {"x": nulls}, group=MILLIONS)
    assert path.stat().st_size < 200_000  # for 320 MB; pyarrow 22 writes 72 kB, earlier ones 2 kB
    rows = ParquetRows(path, group_bytes=1 << 28)
    before = arrow.total_allocated_bytes()
    advice = r"320,000,000 bytes or more .* group_bytes=268,435,456 is the limit.*limit \(group_"
    with pytest.raises(DataError, match=advice):
        rows[0]
    assert arrow.total_allocated_bytes() - before < 1 << 20


def test_a_text_repeated_in_each_row_of_parquet_is_read_up_to_the_limit(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    text = arrow.DictionaryArray.from_arrays(np.zeros(20_000, np.int32), ["x" * 100_000])
    path = write_parquet(tmp_path / "bomb.parquet", {"text": text.cast("string")}, group=20_000)
    assert path.stat().st_size < 60_000  # for 2 GB of text
    before = arrow.total_allocated_bytes()
    with pytest.raises(DataError, match=r"row group 0 takes .* write smaller row groups"):
        ParquetRows(path, group_bytes=1 << 24)[0]
    assert arrow.total_allocated_bytes() - before < 1 << 26


def test_many_texts_of_parquet_are_read_a_few_at_a_time(tmp_path: Path):
    texts = [f"row {row} " * 100 for row in range(3000)]
    path = write_parquet(tmp_path / "texts.parquet", {"text": texts}, group=3000)
    rows = ParquetRows(path, group_bytes=1 << 23)  # 3 MB, and 9 GB if each were the longest
    assert [rows[row]["text"] for row in (0, 1024, 2999)] == [texts[0], texts[1024], texts[2999]]


def test_a_limit_goes_with_the_rows_to_another_process(tmp_path: Path):
    path = write_parquet(tmp_path / "rows.parquet", {"x": np.arange(100_000)}, group=100_000)
    rows = ParquetRows(path, group_bytes=1000)
    for each in (rows, pickle.loads(pickle.dumps(rows))):
        with pytest.raises(DataError, match="group_bytes=1,000 is the limit"):
            each[0]
