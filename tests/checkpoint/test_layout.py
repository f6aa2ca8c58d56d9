"""A checkpoint is committed and deleted atomically, by the one process that may write."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jtrain.checkpoint import CheckpointManager, layout, lock, seal
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
    names = ["1", "12.bak", "22", "best.saving", "notes.txt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


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


SCRIPT = Path(__file__).with_name("writing_process.py")


def spawn(directory: Path, how: str) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), str(directory), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_a_second_writer_is_refused_and_a_dead_one_gives_way(tmp_path: Path):
    with spawn(tmp_path, "hold") as process:
        try:
            second = CheckpointManager(tmp_path)
            for attempt in (second.prepare, second.resume, lambda: second.save(1, STATE, {})):
                with pytest.raises(CheckpointError) as refusal:
                    attempt()
            assert second.steps() == [], "reading is allowed"
        finally:
            process.kill()
    told = str(refusal.value)
    assert re.search(rf"process {process.pid} on \S+ writes there since \d{{4}}-", told)
    assert f"stop it (kill {process.pid})" in told
    assert "name=..." in told
    assert (tmp_path / lock.NAME).exists(), "the lock file remains"
    second.save(1, STATE, {})
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_close_releases_the_lock(tmp_path: Path):
    for step in (1, 2):
        with CheckpointManager(tmp_path) as checkpoints, CheckpointManager(tmp_path) as other:
            checkpoints.save(step, STATE, {})
            assert lock.read_holder(tmp_path)["pid"] == os.getpid()
            with pytest.raises(CheckpointError, match="this process itself: close its") as refusal:
                other.prepare()
            assert f"process {os.getpid()} on" in str(refusal.value)
    assert lock.read_holder(tmp_path) == {}


@pytest.mark.thorough
def test_processes_in_turn_never_hold_the_lock_together(tmp_path: Path):
    """Take turns: each process removes the file, and an open one must not pass for the lock."""
    code = """
import sys, pathlib, jtrain.checkpoint.lock as lock
lock._PATIENCE = 200
place = pathlib.Path(sys.argv[1])
for _ in range(40):
    held = lock.WriteLock(place)
    inside = place / "inside"
    inside.touch(exist_ok=False)
    inside.unlink()
    held.release()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(300) for process in processes] == [0] * 4


def test_a_file_system_without_locks_refuses_nobody(tmp_path: Path, monkeypatch):
    def unknown(*_):
        raise OSError(45 if sys.platform == "darwin" else 95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unknown)
    with CheckpointManager(tmp_path) as one, CheckpointManager(tmp_path) as other:
        one.save(1, STATE, {})
        one.wait()
        other.save(2, STATE, {})


STATE = {"x": jnp.int32(1)}


def test_leftovers_of_a_dead_process_are_removed_and_those_of_a_running_one_stay(tmp_path):
    with CheckpointManager(tmp_path) as writer:
        writer.acquire()
        (tmp_path / "3.saving").mkdir()
        CheckpointManager(tmp_path).remove_leftovers()
        assert {path.name for path in tmp_path.iterdir()} == {lock.NAME, "3.saving"}
    (tmp_path / lock.NAME).write_text('{"pid": 1}')
    CheckpointManager(tmp_path).remove_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_notices_that_its_record_is_anothers(tmp_path: Path):
    held = lock.WriteLock(tmp_path)
    other = {"host": "pod-1", "pid": 7, "since": time.time()}
    (tmp_path / lock.NAME).write_text(json.dumps(other))
    for call in (held.check, held.renew):
        with pytest.raises(CheckpointError, match="process 7 on pod-1 writes there since"):
            call()
    held.release()
    assert json.loads((tmp_path / lock.NAME).read_text()) == other, "and leaves it there"
