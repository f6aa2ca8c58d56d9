"""Pairs of texts as rows of tokens, and what a file may not have."""

import json

import numpy as np
import pytest
from tiny_configs import write_pairs

from jtrain.data.text.corpora import TextPairs
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
