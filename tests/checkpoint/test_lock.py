"""One process writes to a directory; a second is refused at once with the name of the first.

Machines that share a disk are processes with other host names, which see every lock granted.
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

from jtrain.checkpoint import CheckpointManager, lock, writer_beat
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


# Take the directory argv[1] on the machine argv[2], whose disk has locks of its own; argv[3] says
# for how long a machine that does not count is watched.
MACHINE = """
import pathlib, socket, sys

host = sys.argv[2]
socket.gethostname = lambda: host
from jtrain.checkpoint import lock, writer_beat
from jtrain.errors import CheckpointError

writer_beat.BEAT, writer_beat.WATCH = 0.1, float(sys.argv[3])
lock._try_flock = lambda _: True  # of each machine
writer_beat.is_shared = lambda _: True
sys.stdin.readline()
try:
    held = lock.WriteLock(pathlib.Path(sys.argv[1]))
    print("takes", flush=True)
    sys.stdin.readline()  # a run builds its step meanwhile
    held.check()
except CheckpointError as error:
    sys.exit(str(error))
print("writes", flush=True)
sys.stdin.readline()
held.renew()
held.release()
"""


class Machine:
    """A process of another machine that takes a directory when it is asked."""

    def __init__(self, directory: Path, host: str, watch: float = 100.0):
        self.process = subprocess.Popen(
            [sys.executable, "-c", MACHINE, str(directory), host, str(watch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def takes(self) -> bool:
        assert self.process.stdout is not None
        return self.process.stdout.readline() == "takes\n"

    def writes(self) -> bool:
        """Let a machine that took the directory go on; return whether it does."""
        assert self.process.stdout is not None
        self.go()
        return self.process.stdout.readline() == "writes\n"

    def error(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate(timeout=100)


@pytest.mark.thorough
def test_the_second_machine_is_refused_with_what_to_set(tmp_path: Path):
    with Machine(tmp_path, "pod-0") as first, Machine(tmp_path, "pod-1") as second:
        first.go()
        assert first.takes()
        assert first.writes()
        second.go()
        assert not second.takes()
        error = second.error()
        first.go()
        assert first.process.wait(timeout=100) == 0, first.error()
    assert f"process {first.process.pid} on pod-0 writes there since" in error
    assert "set JTRAIN_COORDINATOR=pod-0:8476 and JTRAIN_PROCESSES=2 (their number) for" in error
    assert "JTRAIN_PROCESS=0 on pod-0 and JTRAIN_PROCESS=1 here" in error
    assert list(tmp_path.iterdir()) == [], "the first one removed its record, the second nothing"


@pytest.mark.thorough
def test_of_two_that_begin_at_once_one_goes_on(tmp_path: Path):
    for attempt in range(2):
        place = tmp_path / f"{attempt}"
        with Machine(place, "pod-0") as first, Machine(place, "pod-1") as second:
            first.go()
            second.go()
            took = {each: each.takes() for each in (first, second)}
            wrote = [taken and machine.writes() for machine, taken in took.items()]
            assert sorted(wrote) == [False, True]
            held = lock.read_holder(place)["host"]
            assert held == ("pod-0" if wrote[0] else "pod-1"), "the record is the winner's"


@pytest.mark.thorough
def test_a_killed_machine_gives_way(tmp_path: Path):
    with (
        Machine(tmp_path, "pod-0") as first,
        Machine(tmp_path, "pod-1", watch=1.5) as second,
    ):
        first.go()
        assert first.takes()
        assert first.writes()
        first.process.kill()
        first.process.wait()
        began = time.monotonic()
        second.go()
        assert second.takes()
        assert time.monotonic() - began > 1.4, "it was watched"
        assert second.writes()
        assert lock.read_holder(tmp_path)["host"] == "pod-1"


def test_a_writer_notices_that_its_record_is_anothers(tmp_path: Path):
    held = lock.WriteLock(tmp_path)
    other = {"host": "pod-1", "pid": 7, "since": time.time()}
    (tmp_path / lock.NAME).write_bytes(writer_beat.encode(other))
    for call in (held.check, held.renew):
        with pytest.raises(CheckpointError, match="process 7 on pod-1 writes there since"):
            call()
    held.release()
    assert json.loads((tmp_path / lock.NAME).read_text()) == other, "and leaves it there"


def test_a_disk_of_one_machine_has_no_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_beat, "_kind", lambda _: "ext4")
    assert not writer_beat.is_shared(tmp_path)
    held = lock.WriteLock(tmp_path)
    assert held._beat is None
    held.release()
    for kind in ("nfs4", "lustre", "fuse.gcsfuse", "ceph", "9p", ""):
        monkeypatch.setattr(writer_beat, "_kind", lambda _, kind=kind: kind)
        assert writer_beat.is_shared(tmp_path), kind
