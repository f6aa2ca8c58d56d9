"""One process writes to a directory; a second is refused at once with the name of the first."""

import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from interrupts import interrupted

from jtrain.checkpoint import CheckpointManager, lock
from jtrain.errors import CheckpointError

SCRIPT = Path(__file__).with_name("writing_process.py")


def spawn(directory: Path, how: str) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), str(directory), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


class Naps:
    """The time module whose clock goes on only while somebody sleeps."""

    def __init__(self):
        self.seconds = 0.0

    def __getattr__(self, name: str):
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_second_writer_is_refused_and_a_dead_one_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with spawn(tmp_path, "hold") as process:
        try:
            second = CheckpointManager(tmp_path)
            for attempt in (second.prepare, second.resume, lambda: second.save(1, STATE, {})):
                monkeypatch.setattr(lock, "time", naps := Naps())
                with pytest.raises(CheckpointError) as refusal:
                    attempt()
                assert naps.seconds < 1
            assert second.steps() == [], "reading is allowed"
        finally:
            process.kill()
    monkeypatch.undo()
    told = str(refusal.value)
    assert re.search(rf"process {process.pid} on \S+ writes there since \d{{4}}-", told)
    assert f"stop it (kill {process.pid})" in told
    assert "name=..." in told
    assert (tmp_path / lock.NAME).exists(), "the lock file remains"
    second.save(1, STATE, {})
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.thorough
def test_a_forked_child_does_not_hold_what_its_parent_held(tmp_path: Path):
    with spawn(tmp_path, "fork") as process:
        process.kill()
        process.wait()
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, STATE, {})


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
def test_an_unreadable_lock_record_is_replaced(tmp_path: Path):
    for left in ("", "no json", json.dumps([1]), json.dumps({"pid": "x"})):
        (tmp_path / lock.NAME).write_text(left)
        held = lock.WriteLock(tmp_path)
        (tmp_path / lock.NAME).write_text(left)
        with pytest.raises(CheckpointError, match=r"another process writes there\. Wait for it"):
            lock.WriteLock(tmp_path)
        held.release()


def test_a_removed_directory_is_locked_again_unless_another_holds_it(tmp_path: Path):
    place = tmp_path / "run" / "checkpoints"
    held = lock.WriteLock(place)
    place.rename(tmp_path / "elsewhere")
    other = lock.WriteLock(place)
    with pytest.raises(CheckpointError, match="this process itself"):
        held.renew()
    other.release()
    held.renew()
    assert lock.read_holder(place)["pid"] == os.getpid()
    place.parent.rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        held.renew()
    assert not place.parent.exists()
    held.forget()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_an_entry_in_place_of_the_lock_file_is_named(tmp_path: Path, kind: str):
    path = tmp_path / lock.NAME
    path.mkdir() if kind == "folder" else path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=rf"is no file .*Remove it: rm -r {path}"):
        lock.WriteLock(tmp_path)


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


def test_leftovers_of_a_dead_process_are_removed(tmp_path):
    (tmp_path / lock.NAME).write_text('{"pid": 1}')
    (tmp_path / "3.saving").mkdir()
    CheckpointManager(tmp_path).remove_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_running_writer_stay(tmp_path):
    with CheckpointManager(tmp_path) as writer:
        writer.acquire()
        (tmp_path / "3.saving").mkdir()
        CheckpointManager(tmp_path).remove_leftovers()
        assert {path.name for path in tmp_path.iterdir()} == {lock.NAME, "3.saving"}


# An interrupt while a lock is collected is printed and not raised.
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["lock", "acquire", "close"])
def test_ctrl_c_at_any_moment_leaves_no_lock(tmp_path: Path, way: str, monkeypatch):
    """Interrupt at each moment, and keep the traceback with its frames, like a notebook."""
    kept: list[KeyboardInterrupt] = []
    moment, came = -1, True
    while came:
        moment += 1
        place = tmp_path / str(moment)
        checkpoints = CheckpointManager(place, first=True)
        if way == "close":
            checkpoints.acquire()
        function = getattr(checkpoints, way, lambda place=place: lock.WriteLock(place))
        came = interrupted(function, moment, kept)
        checkpoints.close()
        with monkeypatch.context() as patch:
            patch.setattr(lock, "_PATIENCE", 0.0)
            lock.WriteLock(place).release()  # fails if the lock is still held
    assert len(kept) >= 20, "too few to prove anything"
    kept.clear()
    gc.collect()  # closes what an interrupt left open, before the next test
