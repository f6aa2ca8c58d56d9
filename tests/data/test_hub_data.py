"""Texts and images of data sets of the Hub: rows by index, and what a set may have wrong."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.config.resolve import resolve
from jtrain.data import HubImages, HubTexts, HuggingFace, Shuffled, load_hub_set
from jtrain.data.images.decode import ImageSize
from jtrain.data.images.hub_images import HubImageRows
from jtrain.data.text.hub_texts import TextRows
from jtrain.data.text.tokenizers import ByteTokenizer
from jtrain.errors import DataError

Image = pytest.importorskip("PIL.Image")
SMALL: dict[str, Any] = {"height": 4, "width": 4, "channels": 1}


class Column:
    """What is used of a `datasets.Dataset`."""

    def __init__(self, name: str, values: list[Any]):
        self.name, self.values = name, values

    def select_columns(self, names):
        assert names == [self.name]
        return self

    def with_format(self, kind):
        assert kind is None
        return self

    def __len__(self):
        return len(self.values)

    def __getitem__(self, indices):
        return {self.name: [self.values[i] for i in indices]}


def test_rows_are_the_texts_in_one_order_under_every_split():
    rows = TextRows(Column("text", ["ab", "", "cdefgh", None]), "text", ByteTokenizer(), context=3)
    got = rows[np.array([2, 1, 0])]
    assert got["tokens"].tolist() == [[99, 100, 101, 102], [256, 0, 0, 0], [97, 98, 256, 0]]
    assert got["length"].tolist() == [3, 0, 2]
    with pytest.raises(DataError, match=r"Row 3 of column 'text' holds NoneType.*data.column"):
        rows[np.array([3])]
    texts = Shuffled(TextRows(Column("text", [*"abcdefgh"]), "text", ByteTokenizer(), 1), size=4)
    halves = [texts.shard(i, 2)[5]["tokens"] for i in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), texts[5]["tokens"])


@pytest.mark.slow
def test_a_set_of_texts_is_read_by_its_name(tmp_path, monkeypatch):
    """A folder stands for a name: `datasets` reads both alike."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Path("org/set").mkdir(parents=True)
    for split, count in {"train": 20, "test": 3}.items():
        lines = [json.dumps({"text": f"{split} {i}", "number": i}) for i in range(count)]
        Path(f"org/set/{split}.jsonl").write_text("\n".join(lines))
    corpus = HubTexts(name="org/set", context=8).build()
    assert (len(corpus.train), len(corpus.validation)) == (18, 2)
    corpus = HubTexts(name="org/set", split="train[:10]", validation="test", context=9).build()
    assert (len(corpus.train), len(corpus.validation)) == (10, 3)
    row = corpus.validation[np.array([2])]
    assert corpus.vocabulary.decode(row["tokens"][0, : row["length"][0]]) == "test 2"
    numbers = HuggingFace(load_hub_set("org/set"), columns=["number"])
    assert numbers[np.array([5, 1])]["number"].tolist() == [5, 1]


def png(grey: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (4, 4), grey).save(stream, "PNG")
    return stream.getvalue()


def rows_of(files: list[Any]) -> HubImageRows:
    label = np.arange(len(files), dtype=np.int32)
    return HubImageRows(
        Column("image", files), "image", label, ImageSize(**SMALL), "org/set (train)"
    )


def test_rows_are_the_images_in_one_order_under_every_split(tmp_path: Path):
    (tmp_path / "7.png").write_bytes(png(7))
    files = [{"bytes": png(grey), "path": None} for grey in range(7)]
    rows = rows_of([*files, {"bytes": None, "path": str(tmp_path / "7.png")}])
    batch = rows[np.array([7, 2])]
    assert batch["image"].shape == (2, 4, 4, 1)
    np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], batch["label"])
    shuffled = Shuffled(rows, size=4)
    halves = [shuffled.shard(i, 2)[5]["image"] for i in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), shuffled[5]["image"])


@pytest.mark.parametrize("content", [png(3)[:-20], b"", b"GIF89a"])
def test_a_damaged_image_is_named_by_its_row(content: bytes):
    rows = rows_of([{"bytes": png(0), "path": "0.png"}, {"bytes": content, "path": "1.png"}, None])
    for row in (1, 2):
        with pytest.raises(
            DataError, match=rf"^image {row} of org/set \(train\) should be"
        ) as found:
            rows[np.array([0, row])]
        assert "data.damaged" not in str(found.value)


@pytest.mark.slow
def test_a_set_of_images_is_read_by_its_name(tmp_path, monkeypatch):
    """A folder stands for a name: `datasets` reads both alike."""
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Path("org/set").mkdir(parents=True)
    classes = datasets.ClassLabel(names=["even", "odd", "none"])
    features = datasets.Features(img=datasets.Image(), y=classes, text=datasets.Value("string"))
    for split, count in {"train": 20, "test": 6}.items():
        images = [{"bytes": png(i), "path": None} for i in range(count)]
        columns = {"img": images, "y": [i % 2 for i in range(count)], "text": ["a"] * count}
        made = datasets.Dataset.from_dict(columns, features)
        made.to_parquet(f"org/set/{split}.parquet")
    names: dict[str, Any] = {"name": "org/set", "image": "img", "label": "y"}
    found = HubImages(**names, **SMALL).build()
    assert (len(found.train), len(found.validation), found.classes) == (18, 2, 3)
    typed = [f"data.{key}={value}" for key, value in {"kind": "hf", **names, **SMALL}.items()]
    data = resolve("image_folder", [*typed, "data.validation=test"]).config.data
    found = data.build()
    assert (len(found.train), len(found.validation), found.image) == (20, 6, (4, 4, 1))
    batch = found.validation[np.array([5, 2])]
    assert batch["image"][:, 0, 0, 0].tolist() == [5, 2]
    assert batch["label"].tolist() == [1, 0]
    for change, words in {
        "text": r"holds Value.*, and images are needed. Set data.image to one of \['img'\]",
        "picture": "Column 'picture' was requested",
    }.items():
        with pytest.raises(DataError, match=words):
            HubImages(**{**names, "image": change}).build()
    with pytest.raises(DataError, match=r"should hold classes 0 .. n, and holds Value"):
        HubImages(**{**names, "label": "text"}).build()
    # Files that another program wrote: plain columns, a class that is not given.
    Path("plain").mkdir()
    table = parquet.read_table("org/set/train.parquet").replace_schema_metadata(None)
    parquet.write_table(table, "plain/train.parquet")
    found = HubImages(**{**names, "name": "plain"}, **SMALL).build()
    assert found.classes == 2
    assert found.train[np.array([4])]["image"].shape == (1, 4, 4, 1)
