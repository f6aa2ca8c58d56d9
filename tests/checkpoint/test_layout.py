"""A checkpoint is committed and deleted atomically, wherever the process stops."""

import json
import shutil
from pathlib import Path

import pytest

from jtrain.checkpoint import layout, seal
from jtrain.errors import CheckpointError


def write(directory: Path, step: int, text: str) -> None:
    layout.make_directory(directory)
    begun = layout.create_saving_path(directory, step)
    (begun / "state").mkdir()
    (begun / "state" / "data").write_text(text)
    record = {"step": step, "leaves": {}, "fingerprints": {}, "best": {}, "about": {"text": text}}
    layout.commit(begun, record)


def whole(directory: Path) -> dict[int, str]:
    """Return the content of each listed checkpoint, after a check."""
    for step in layout.list_steps(directory):
        record = layout.read_record(directory, step)
        layout.check_valid(directory, step)
        assert (directory / str(step) / "state" / "data").read_text() == record["about"]["text"]
    return {
        step: layout.read_record(directory, step)["about"]["text"]
        for step in layout.list_steps(directory)
    }


class Killed(BaseException):
    """Stand-in for SIGKILL: no code of jtrain catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Raise before the n-th change of the directory; return the changes before it."""
    done: list[str] = []

    def watched(what, function):
        def call(*args, **kwargs):
            if len(done) == count:
                raise Killed
            done.append(what)
            return function(*args, **kwargs)

        return call

    for owner, what in [
        (Path, "mkdir"),
        (Path, "rename"),
        (Path, "write_text"),
        (shutil, "rmtree"),
        (seal, "sync"),
    ]:
        monkeypatch.setattr(owner, what, watched(what, getattr(owner, what)))
    return done


@pytest.mark.thorough
def test_a_kill_before_any_change_loses_no_valid_checkpoint(tmp_path: Path):
    outcomes = set()
    for count in range(100):
        directory = tmp_path / str(count)
        write(directory, 1, "one")
        write(directory, 2, "two")
        with pytest.MonkeyPatch.context() as patch:
            done = kill_at(patch, count)
            try:
                write(directory, 3, "three")
                layout.delete_checkpoint(directory, 1)
                write(directory, 3, "three again")
            except Killed:
                pass
            finished = len(done) < count
        layout.clear_leftovers(directory)
        assert layout.list_leftovers(directory) == []
        found = whole(directory)
        assert found[2] == "two"
        assert 1 in found or 3 in found
        outcomes.add(json.dumps(found))
        if finished:
            assert found == {2: "two", 3: "three again"}
            break
    else:
        pytest.fail("the writing never came to its end")
    # Each intermediate state occurred, and no other.
    assert outcomes == {
        json.dumps({1: "one", 2: "two"}),
        json.dumps({1: "one", 2: "two", 3: "three"}),
        json.dumps({2: "two", 3: "three"}),
        json.dumps({2: "two", 3: "three again"}),
    }


def test_other_files_are_left_alone(tmp_path: Path):
    write(tmp_path, 1, "one")
    for name in ("notes.txt", "best.saving", "12.bak"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "22").mkdir()
    layout.clear_leftovers(tmp_path)
    assert whole(tmp_path) == {1: "one"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "1",
        "12.bak",
        "22",
        "best.saving",
        "notes.txt",
    ]


def test_the_error_for_a_missing_checkpoint_lists_the_others(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"does not exist. Train first"):
        layout.read_record(tmp_path / "none", 3)
    with pytest.raises(CheckpointError, match=r"is empty. Train first"):
        layout.read_record(tmp_path, 3)
    layout.create_saving_path(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"only 3.saving, which is not complete. Restart"):
        layout.read_record(tmp_path, 3)
    write(tmp_path, 1, "one")
    write(tmp_path, 20, "twenty")
    with pytest.raises(CheckpointError, match=r"there are 1, 20. Name .* the newest \(20\)"):
        layout.read_record(tmp_path, 3)
    assert layout.read_record(tmp_path, 20)["about"] == {"text": "twenty"}


@pytest.mark.parametrize(("name", "damage"), [("state/data", "cut"), ("about.json", "gone")])
def test_the_error_for_a_damaged_checkpoint_has_advice(tmp_path: Path, name: str, damage: str):
    write(tmp_path, 1, "one")
    write(tmp_path, 2, "two")
    path = tmp_path / "2" / name
    text = path.read_text()
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError) as refusal:
        layout.check_valid(tmp_path, 2)
    message = str(refusal.value)
    assert message.startswith(f"checkpoint 2 is damaged: {name}: is ")
    assert message.endswith("newest valid one, and jtrain eval takes --step 1.")
    assert layout.list_steps(tmp_path) == [1]
    assert layout.set_aside(tmp_path, 2) == tmp_path / "2.damaged"
    layout.clear_leftovers(tmp_path)
    assert whole(tmp_path) == {1: "one"}
    assert (tmp_path / "2.damaged").is_dir(), "it may be the only rest of somebody's work"


@pytest.mark.parametrize(
    ("suffix", "kind"), [(".saving", "file"), (".deleting", "link"), (".replaced", "folder")]
)
def test_any_entry_with_the_name_of_a_leftover_is_removed(tmp_path: Path, suffix: str, kind: str):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("theirs")
    write(tmp_path, 2, "two")
    for step in (2, 7):
        path = tmp_path / f"{step}{suffix}"
        if kind == "file":
            path.write_text("no folder")
        elif kind == "link":
            path.symlink_to(outside)
        else:
            (path / "state").mkdir(parents=True)
    if suffix == ".replaced" and kind == "folder":  # a step that was being replaced: put back
        layout.try_remove(tmp_path / "7.replaced")
    write(tmp_path, 2, "two again")
    layout.delete_checkpoint(tmp_path, 2)
    write(tmp_path, 3, "three")
    layout.clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "outside"]
    assert (outside / "kept").read_text() == "theirs"
