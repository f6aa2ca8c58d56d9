"""Lines from a config: rows of tokens for training, every line once for validation."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from jtrain.data.text.line_corpus import TextLines
from jtrain.errors import DataError


def test_lines_are_rows_of_tokens(tmp_path: Path):
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "ab"}\n{"text": "abcdefgh"}\n')
    (tmp_path / "judge.txt").write_text("xy\n\nlonger than that\nz\n")
    asked = TextLines(
        path=f"{tmp_path}/*.jsonl", validation=f"{tmp_path}/judge.txt", context=4, buffer=1
    )
    corpus = asked.build()
    train, valid = corpus.shuffled(size=2, seed=0), corpus.in_order(size=2)
    np.testing.assert_array_equal(train[0]["tokens"], [[97, 98, 256, 0, 0], list(b"abcde")])
    np.testing.assert_array_equal(train[0]["length"], [2, 4])
    assert train.shard(1, 2).summary.startswith("data: 2 files, 2 processes: this one reads 1")
    rows = [valid[i] for i in range(len(valid))]
    assert sum(int(row["mask"].sum()) for row in rows) == 3
    assert rows[0]["tokens"][1].tolist() == list(b"longe")


def test_reports_an_empty_validation_file_and_the_sharding_of_files(tmp_path: Path):
    (tmp_path / "empty.txt").write_text("\n")
    asked = TextLines(path=f"{tmp_path}/empty.txt", validation=f"{tmp_path}/empty.txt")
    with pytest.raises(DataError, match=r"has no line with text in it\. Name a file"):
        asked.build().in_order(size=2)
    with pytest.raises(ValidationError, match="'auto', 'file', 'data' or 'off'"):
        TextLines(path="a", validation="b", sharing="rows")
