"""Rows that the disk does not take are not lost."""

from pathlib import Path

import pytest
from full_disk import files_of_at_most

from jtrain.hooks.rows import Rows, read


def test_what_the_disk_does_not_take_is_written_once_it_does(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    rows.append({"step": 1})
    with files_of_at_most(30):
        rows.append({"step": 2, "loss": 0.1 + 0.2})  # is cut in its middle
        rows.append({"step": 3})
        assert [row["step"] for row in read(path)] == [1]
        with pytest.raises(OSError, match="too large"):
            rows.sync()
    rows.append({"step": 4})
    rows.sync()
    rows.close()
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4]
    assert read(path)[1]["loss"] == 0.1 + 0.2


def test_closing_on_a_full_disk_leaves_whole_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    with files_of_at_most(20):
        rows = Rows(path)
        rows.append({"step": 1})
        rows.append({"step": 2})
        rows.close()
    assert [row["step"] for row in read(path)] == [1]
