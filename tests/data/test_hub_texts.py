"""Texts of data sets of the Hub: rows by index, and what a set may have wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from jtrain.data import HubTexts, HuggingFace, Shuffled, load_hub_set
from jtrain.data.text.hub_texts import TextRows
from jtrain.data.text.tokenizers import ByteTokenizer
from jtrain.errors import DataError


class Columns:
    """What is used of a `datasets.Dataset`."""

    def __init__(self, texts):
        self.texts = texts

    def select_columns(self, names):
        assert names == ["text"]
        return self

    def with_format(self, kind):
        assert kind is None
        return self

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, indices):
        return {"text": [self.texts[i] for i in indices]}


def test_rows_are_the_texts_in_one_order_under_every_split():
    rows = TextRows(Columns(["ab", "", "cdefgh", None]), "text", ByteTokenizer(), context=3)
    got = rows[np.array([2, 1, 0])]
    assert got["tokens"].tolist() == [[99, 100, 101, 102], [256, 0, 0, 0], [97, 98, 256, 0]]
    assert got["length"].tolist() == [3, 0, 2]
    with pytest.raises(DataError, match=r"Row 3 of column 'text' holds NoneType.*data.column"):
        rows[np.array([3])]
    texts = Shuffled(TextRows(Columns([*"abcdefgh"]), "text", ByteTokenizer(), 1), size=4)
    halves = [texts.shard(i, 2)[5]["tokens"] for i in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), texts[5]["tokens"])


@pytest.mark.slow
def test_a_data_set_is_read_by_its_name(tmp_path, monkeypatch):
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
