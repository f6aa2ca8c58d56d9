"""Pairs of texts as rows of tokens, and what a file may not have."""

import json

import numpy as np
import pytest
from tiny_configs import write_pairs

from jtrain.data.text.text_pairs import TextPairs
from jtrain.errors import DataError
from jtrain.models.embeddings import hard_negatives


def test_rows_are_the_texts_of_the_file(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 20)
    corpus = TextPairs(path=str(path), negatives=2, context=8).build()
    assert (len(corpus.train), len(corpus.validation)) == (18, 2)
    row = {name: array[0] for name, array in corpus.train[np.array([3])].items()}
    texts = [bytes(t[v].astype(np.uint8)).decode() for t, v in zip(*row.values(), strict=True)]
    assert texts == ["3", "after 3", "after 4", "at 3"]
    assert not row["tokens"][~row["visible"]].any()


def test_a_large_share_for_validation_leaves_a_row_to_train_on(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 3)
    corpus = TextPairs(path=str(path), validation=0.9).build()
    assert (len(corpus.train), len(corpus.validation)) == (1, 2)
    one = write_pairs(tmp_path / "b.jsonl", 1)
    with pytest.raises(DataError, match="has 1 row, and training and validation need one each"):
        TextPairs(path=str(one), validation=0.9).build()


def test_a_parquet_file_is_read_alike(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = write_pairs(tmp_path / "a.jsonl", 20)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    one, other = (
        TextPairs(path=str(tmp_path / name), negatives=1).build().train[np.arange(5)]
        for name in ("a.jsonl", "a.parquet")
    )
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])


def test_long_texts_are_cut_and_keep_their_marks(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "after": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["[CLS]", "[SEP]"])
    words.save(str(tmp_path / "tokenizer.json"))
    pair = {"anchor": "[SEP] " * 9, "positive": "after"}
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(pair)] * 4))
    data = TextPairs(
        path=str(tmp_path / "a.jsonl"),
        tokenizer=str(tmp_path / "tokenizer.json"),
        marks=("[CLS]", "[SEP]"),
        context=5,
    )
    tokens = data.build().train[np.array([0])]["tokens"][0]
    assert tokens.tolist() == [[2, 0, 0, 0, 3], [2, 1, 3, 0, 0]]  # a mark in a text is plain text


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"anchor": "a"}, {}, r"a.jsonl:1 needs an `anchor` and a `positive`.*has anchor"),
        ({"anchor": "", "positive": "b"}, {}, "text that is not empty"),
        ([1], {}, "has list"),
        ({"anchor": "a", "positive": "\ud800"}, {}, "a.jsonl:1 has half of a surrogate pair"),
        ({"anchor": "a", "positive": "b"}, {"negatives": 1}, "Set data.negatives=0"),
        ({"anchor": "a", "positive": "b", "negatives": [3]}, {"negatives": 1}, "list of texts"),
        ({"anchor": "a", "positive": "b", "negatives": "c"}, {"negatives": 1}, "no list of"),
        ({"anchor": "a", "positive": "b"}, {"marks": ("[CLS]",)}, r"Set data.marks="),
        ({"anchor": "a", "positive": "b"}, {"marks": ("[CLS]", "[SEP]")}, "Set data.marks=\\[\\]"),
    ],
)
def test_refuses_rows_of_another_form(tmp_path, row, settings, words):
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    with pytest.raises(DataError, match=words):
        TextPairs(path=str(tmp_path / "a.jsonl"), **settings).build()


@pytest.mark.parametrize(("text", "words"), [("{", "is no JSON"), ("", "has 0 rows")])
def test_refuses_files_without_rows(tmp_path, text, words):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=words):
        TextPairs(path=str(tmp_path / "a.jsonl")).build()


def test_hard_negatives_are_the_nearest_of_the_others():
    draw = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    anchors, texts = unit(draw.normal(size=(7, 5))), unit(draw.normal(size=(9, 5)))
    own = draw.integers(0, 9, 7)
    found = hard_negatives(anchors, texts, own, count=3, skip=1, block=2)
    for i, anchor in enumerate(anchors):
        ranked = sorted((j for j in range(9) if j != own[i]), key=lambda j: -(anchor @ texts[j]))
        assert found[i].tolist() == ranked[1:4]
    with pytest.raises(DataError, match="Set count=7 or less"):
        hard_negatives(anchors, texts, own, count=8, skip=1)
    assert hard_negatives(anchors, texts, own, count=7, skip=1).shape == (7, 7)


def test_a_text_equal_to_the_anchor_or_its_positive_is_no_negative():
    draw = np.random.default_rng(0)
    unit = lambda x: (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    texts, anchors = unit(draw.normal(size=(6, 5))), unit(draw.normal(size=(2, 5)))
    texts[4] = unit(texts[:1] * 1.7)[0]  # the positive of anchor 0 again
    texts[5] = anchors[1]
    found = hard_negatives(anchors, texts, np.array([0, 1]), count=4)
    assert [sorted(row) for row in found.tolist()] == [[1, 2, 3, 5], [0, 2, 3, 4]]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (4, r"Set count=1 or less"),
        (2, r"Set skip=0 and count=1 or less"),
        (1, r"\. Give more texts"),
    ],
)
def test_too_few_texts_are_refused_with_numbers_that_do(texts, words):
    unit = np.eye(5, dtype=np.float32)
    with pytest.raises(DataError, match=words):
        hard_negatives(unit[4:], unit[:texts], np.array([0]), count=2, skip=2)
