"""Rows that the disk does not take are not lost."""

import os
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from jtrain.io.jsonl import JsonlWriter, find_truncation, read_rows


def test_what_the_disk_does_not_take_is_written_once_it_does(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = JsonlWriter(path)
    rows.append({"step": 1})
    with files_of_at_most(30):
        rows.append({"step": 2, "loss": 0.1 + 0.2})  # is cut in its middle
        rows.append({"step": 3})
        assert [row["step"] for row in read_rows(path)] == [1]
        with pytest.raises(OSError, match="too large"):
            rows.sync()
    rows.append({"step": 4})
    rows.sync()
    rows.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4]
    assert read_rows(path)[1]["loss"] == 0.1 + 0.2


def test_closing_on_a_full_disk_leaves_complete_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    with files_of_at_most(20):
        rows = JsonlWriter(path)
        rows.append({"step": 1})
        rows.append({"step": 2})
        rows.close()
    assert [row["step"] for row in read_rows(path)] == [1]


LOSSES = {
    "removed": (Path.unlink, [1, 2, 3, 4], "it was removed while the run wrote it. All rows"),
    "renamed": (lambda p: p.rename(p.with_name("old")), [1, 2, 3, 4], "it was removed while"),
    "replaced": (lambda p: swap(p, b"other"), [1, 2, 3, 4], "another file replaced it"),
    "linked": (lambda p: link(p), [1, 2, 3, 4], "another file replaced it"),
    "cut in a row": (
        lambda p: os.truncate(p, 20),
        [1, 3, 4],
        "12 of 24 bytes are left: the rows after",
    ),
    "emptied": (lambda p: p.write_text(""), [3, 4], "0 of 24 bytes are left: all rows are lost"),
    "written": (lambda p: append(p, b"torn"), [1, 2, 3, 4], "had 24 bytes, and has 28"),
}


def swap(path: Path, content: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(content)
    other.replace(path)


def link(path: Path) -> None:
    path.unlink()
    path.with_name("outside").write_bytes(b"")
    path.symlink_to(path.with_name("outside"))


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


@pytest.mark.parametrize("how", LOSSES)
def test_changes_by_others_are_reported_at_the_next_row_and_fixed(tmp_path: Path, how: str):
    act, steps, words = LOSSES[how]
    path, told = tmp_path / "rows.jsonl", []
    rows = JsonlWriter(path, lost=told.append)
    for step in (1, 2):
        rows.append({"step": step})
    act(path)
    assert told == []
    rows.append({"step": 3})
    (line,) = told
    assert line.startswith(f"{path}")
    assert words in line
    rows.append({"step": 4})
    rows.sync()
    mark = rows.mark()
    rows.close()
    assert len(told) == 1, "once"
    assert [row["step"] for row in read_rows(path)] == steps
    assert not path.is_symlink()
    assert mark["bytes"] == path.stat().st_size
    assert find_truncation(path, mark) == ""


@pytest.mark.parametrize("moved", [True, False])
def test_rows_go_where_their_folder_goes(tmp_path: Path, moved: bool):
    path, told = tmp_path / "run" / "rows.jsonl", []
    rows = JsonlWriter(path, lost=told.append)
    rows.append({"step": 1})
    path.parent.rename(tmp_path / "elsewhere")
    if not moved:
        path.parent.mkdir()  # another, in its place
    rows.append({"step": 2})
    rows.append({"step": 3})
    rows.close()
    assert told == [f"{path.parent} was moved or removed while the run wrote in it"]
    assert [row["step"] for row in read_rows(tmp_path / "elsewhere" / path.name)] == [1, 2, 3]
    assert not path.exists()


def test_a_file_that_goes_on_is_compared_with_what_it_was(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = JsonlWriter(path)
    for step in (1, 2, 3):
        rows.append({"step": step})
    rows.sync()
    mark = rows.mark()
    rows.append({"step": 4})
    rows.close()
    content = path.read_bytes()
    assert find_truncation(path, mark) == "", "more rows are no fault"
    rows = JsonlWriter(path, resumed_at=3)
    assert rows.mark() == mark
    rows.close()
    found = {
        content[:30]: f"{path} was truncated. 30 of 36 bytes are left: the rows after step 2 are",
        content.replace(b"1", b"0"): f"{path} was changed: its first 36 bytes differ",
        b"": f"{path} was truncated. 0 of 36 bytes are left: all rows are lost",
    }
    for text, words in found.items():
        path.write_bytes(text)
        assert find_truncation(path, mark).startswith(words)
    path.unlink()
    assert find_truncation(path, mark) == f"{path} is missing: its 36 bytes are lost"
    os.mkfifo(path)
    assert find_truncation(path, mark) == f"{path} is missing: its 36 bytes are lost", (
        "and nothing hangs"
    )


def test_a_full_disk_is_no_loss_and_a_file_that_cannot_be_written_again_is_told_when_it_is(
    tmp_path: Path,
):
    path, told = tmp_path / "rows.jsonl", []
    rows = JsonlWriter(path, lost=told.append)
    rows.append({"step": 1})
    path.unlink()
    with files_of_at_most(5):
        rows.append({"step": 2})
        assert told == []
    rows.append({"step": 3})
    rows.close()
    assert len(told) == 1
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
