"""One process writes to a directory; a second is refused at once with the name of the first.

On a disk that grants the lock on each machine the last one is the writer.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jtrain.checkpoint import CheckpointManager, lock
from jtrain.errors import CheckpointError

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
