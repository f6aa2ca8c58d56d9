"""Faults of memory and of the disk are found, each with the line to type."""

import dataclasses
import resource
from pathlib import Path

import pytest
from fakes import names, result, the, write_files
from full_disk import files_of_at_most
from permissions import permissions_hold

from jtrain.inspect.doctor import disk, memory
from jtrain.inspect.doctor.child import Child, ChildResult
from jtrain.inspect.doctor.probe_disk import probe

PROC = {"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n"}


def test_memory_of_a_machine(tmp_path):
    facts = memory.gather_memory(write_files(tmp_path, PROC))
    assert (facts.total, facts.free) == (16_384_000_000, 12_288_000_000)
    quiet = dataclasses.replace(facts, addresses=(-1, -1), files=(1024, 1024), file_bytes=(-1, -1))
    assert names(memory.check_memory(quiet)) == ["ok"]
    (little,) = memory.check_memory(dataclasses.replace(quiet, available=400_000_000))
    assert (little.name, little.status) == ("memory-little", "error")
    (shared,) = memory.check_memory(dataclasses.replace(quiet, shared=64 << 20))
    assert shared.name == "shared-memory"
    assert "--shm-size" in shared.remedy


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/jobs/seven\n",
            "sys/fs/cgroup/jobs/memory.max": "1000000000\n",
            "sys/fs/cgroup/jobs/memory.current": "900000000\n",
            "sys/fs/cgroup/jobs/memory.stat": "anon 1\ninactive_file 200000000\n",
            "sys/fs/cgroup/jobs/seven/memory.max": "max\n",
        },
        {
            "proc/self/cgroup": "4:memory:/jobs/seven\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "700000000\n",
        },
    ],
    ids=["v2", "v1"],
)
def test_the_memory_limit_of_a_job(tmp_path, files):
    facts = memory.gather_memory(write_files(tmp_path, {**PROC, **files}))
    assert (facts.limit, facts.used, facts.free) == (1_000_000_000, 700_000_000, 300_000_000)
    finding = the(memory.check_memory(facts), "memory-limit")
    assert finding.status == "error"
    assert "300MB are left of the job's limit" in finding.found


@pytest.mark.parametrize(
    ("which", "limit", "name", "remedy"),
    [
        ("RLIMIT_AS", 8 << 30, "limit-addresses", "ulimit -v unlimited"),
        ("RLIMIT_FSIZE", 1 << 30, "limit-file-size", "ulimit -f unlimited"),
        ("RLIMIT_NOFILE", 512, "limit-files", "ulimit -n 1024"),
    ],
)
def test_limits_of_a_process(tmp_path, which, limit, name, remedy):
    """Set really, so that the facts are what the kernel says."""
    before = resource.getrlimit(getattr(resource, which))
    resource.setrlimit(getattr(resource, which), (limit, before[1]))
    try:
        facts = memory.gather_memory()
    finally:
        resource.setrlimit(getattr(resource, which), before)
    finding = the(memory.check_memory(facts), name)
    hard = before[1] if which != "RLIMIT_NOFILE" else -1
    assert finding.remedy == remedy if hard < 0 else "administrator" in finding.remedy


def probed(directory: Path) -> ChildResult:
    reports = {}
    probe(directory, lambda **values: reports.update(values))
    return result(**reports)


def checked_disk(directory: Path, ended: ChildResult, kind: str = "ext4", needed: int = 0):
    return disk.check_disk(directory, ended, kind=kind, needed=needed)


def test_a_healthy_disk_and_nothing_is_left(tmp_path):
    ended = probed(tmp_path / "runs/deep")
    assert ended.reports["existing"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    if not {"disk-little", "disk-slow"} & {*names(checked_disk(tmp_path, ended))}:
        (finding,) = checked_disk(tmp_path, ended)
        assert finding.status == "ok"


def test_a_directory_that_cannot_be_written(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o500)
    with permissions_hold():
        finding = the(checked_disk(runs, probed(runs)), "disk-create")
    assert "Permission denied" in finding.found
    assert "chmod u+rwx" in finding.found
    runs.chmod(0o700)
    with permissions_hold():
        assert "disk-create" not in names(checked_disk(runs, probed(runs)))


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "runs").write_text("")
    finding = the(checked_disk(tmp_path / "runs/a", probed(tmp_path / "runs/a")), "disk-create")
    assert "move the file away" in finding.found
    assert (tmp_path / "runs").read_text() == ""


def test_a_disk_that_takes_no_more(tmp_path):
    with files_of_at_most(1 << 20):
        ended = probed(tmp_path)
    finding = the(checked_disk(tmp_path, ended), "disk-write")
    assert "ulimit -f" in finding.found
    assert list(tmp_path.iterdir()) == []


def test_space_speed_and_kind(tmp_path):
    space = {"free": 50_000_000, "total": 10**12, "files": 10}
    write = {"bytes": 1 << 20, "seconds": 1.0, "fsync_seconds": 0.7}
    usual = {"existing": str(tmp_path)}
    found = checked_disk(tmp_path, result(space=space, write=write, **usual))
    assert names(found) == ["disk-full", "disk-files", "disk-slow"]
    good = {"bytes": 1 << 25, "seconds": 0.1, "fsync_seconds": 0.001}
    some = {**space, "free": 1_000_000_000, "files": -1}
    found = checked_disk(tmp_path, result(space=some, write=good, **usual))
    assert names(found) == ["disk-little"]
    found = checked_disk(tmp_path, result(space=some, write=good, **usual), needed=1_500_000_000)
    assert names(found) == ["disk-full"]
    assert "two checkpoints of the run" in found[0].found
    plenty = {**space, "free": 10**11, "files": 10**6}
    for kind, name in {
        "tmpfs": "disk-in-memory",
        "fuse.gcsfuse": "disk-is-object-store",
        "nfs4": "ok",
    }.items():
        ended = result(space=plenty, write=good, **usual)
        assert names(checked_disk(tmp_path, ended, kind)) == [name]


def test_a_file_server_that_hangs(tmp_path, monkeypatch):
    write_files(tmp_path, {"hanging.py": "import time\ndef main(given, file): time.sleep(60)\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with Child("hanging", {}, timeout=0.5) as child:
        ended = child.wait()
    (finding,) = checked_disk(tmp_path, ended)
    assert finding.name == "disk-hangs"
    assert "its file server hangs" in finding.found


def test_the_type_of_a_file_system():
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /data rw,nosuid - nfs4 server:/export rw\n"
        "3 1 0:6 / /data/my\\040runs rw shared:1 - tmpfs tmpfs rw\n"
    )
    for path, kind in {"/data/a": "nfs4", "/data/my runs/a": "tmpfs", "/database": "ext4"}.items():
        assert disk.filesystem(Path(path), mounts) == kind


def test_the_space_of_two_checkpoints(tmp_path):
    assert disk.checkpoint_bytes(tmp_path) == 0
    sizes = {"checkpoints/9/a": "12", "checkpoints/10/a": "123", "checkpoints/10/d/b": "4567"}
    assert disk.checkpoint_bytes(write_files(tmp_path, sizes)) == 7
