"""Machines that share a disk: the second one to begin a run is refused, whatever the disk locks.

Each machine is a process with another host name. On a disk whose locks do not hold among machines,
each process sees every lock granted.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jtrain.checkpoint import lock, writer_beat
from jtrain.errors import CheckpointError

# Take the directory argv[1] on the machine argv[2]; argv[3] says which locks its disk has, and
# argv[4] for how long a machine that does not count is watched.
MACHINE = """
import pathlib, socket, sys

host, disk = sys.argv[2:4]
socket.gethostname = lambda: host
from jtrain.checkpoint import lock, writer_beat
from jtrain.errors import CheckpointError

writer_beat.BEAT, writer_beat.WATCH = 0.1, float(sys.argv[4])
if disk == "of each machine":
    lock._try_flock = lambda _: True
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

    def __init__(
        self, directory: Path, host: str, disk: str = "of each machine", watch: float = 100.0
    ):
        self.process = subprocess.Popen(
            [sys.executable, "-c", MACHINE, str(directory), host, disk, str(watch)],
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


@pytest.mark.parametrize(
    "disk", ["of each machine", pytest.param("of all machines", marks=pytest.mark.thorough)]
)
def test_the_second_machine_is_refused_with_what_to_set(tmp_path: Path, disk: str):
    with Machine(tmp_path, "pod-0", disk) as first, Machine(tmp_path, "pod-1", disk) as second:
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
    for attempt in range(3):
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


def test_the_kind_of_a_file_system_is_the_kernels():
    kind = writer_beat._kind(Path("/proc"))
    assert kind == "proc" or not Path("/proc/self/mountinfo").exists()
    assert writer_beat._kind(Path("/no/such/folder")) == ""


def test_a_mount_may_have_a_name_that_is_no_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    device = os.stat(tmp_path).st_dev
    where = f"{os.major(device)}:{os.minor(device)}".encode()
    (tmp_path / "mountinfo").write_bytes(b"20 1 " + where + b" / /media/M\xfcller rw - ext4 a rw\n")
    monkeypatch.setattr(writer_beat, "Path", lambda _: tmp_path / "mountinfo")
    assert writer_beat._kind(tmp_path) == "ext4"


def test_a_writer_counts_until_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_beat, "is_shared", lambda _: True)
    monkeypatch.setattr(writer_beat, "BEAT", 0.02)
    held = lock.WriteLock(tmp_path)
    path = tmp_path / lock.NAME
    assert writer_beat.is_counting(path)
    assert path.stat().st_size == writer_beat.LENGTH
    beat = held._beat
    assert beat is not None
    held.release()
    assert not path.exists()
    beat._thread.join(60)
    assert not beat._thread.is_alive()
