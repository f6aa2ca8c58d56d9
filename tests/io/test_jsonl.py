"""Rows survive a kill and a full disk."""

from pathlib import Path

import pytest
from full_disk import files_of_at_most

from jtrain.errors import CheckpointError
from jtrain.io.jsonl import JsonlWriter, read_rows


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_rows_that_the_disk_refuses_are_written_later_and_reported_by_sync(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = JsonlWriter(path)
    rows.append({"step": 1})
    with files_of_at_most(30):
        rows.append({"step": 2, "loss": 0.1 + 0.2})  # is cut in its middle
        rows.append({"step": 3})
        assert steps(path) == [1]
        with pytest.raises(OSError, match="too large"):
            rows.sync()
    rows.append({"step": 4})
    rows.sync()
    rows.close()
    assert steps(path) == [1, 2, 3, 4]
    assert read_rows(path)[1]["loss"] == 0.1 + 0.2


def test_a_resumed_run_drops_a_torn_row_and_the_rows_that_it_writes_again(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    rows = JsonlWriter(path, resumed_at=2)
    rows.append({"step": 3, "loss": float("nan")})
    rows.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": "NaN"}\n'


def test_a_damaged_row_before_others_is_an_error(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=rf"row 2 .*remove it: sed -i 2d {path}"):
        JsonlWriter(path, resumed_at=3)
