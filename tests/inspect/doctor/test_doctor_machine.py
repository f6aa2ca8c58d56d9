"""Faults of the disk are found, each with the line to type."""

from pathlib import Path

from fakes import names, result, the, write_files
from permissions import permissions_hold

from jtrain.inspect.doctor.checks import ChildResult, start_child
from jtrain.inspect.doctor.disk import check_disk, probe


def probed(directory: Path) -> ChildResult:
    reports = {}
    probe(directory, lambda **values: reports.update(values))
    return result(**reports)


def test_a_healthy_disk_and_nothing_is_left(tmp_path):
    ended = probed(tmp_path / "runs/deep")
    assert ended.reports["existing"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    if not {"disk-little", "disk-slow"} & {*names(check_disk(tmp_path, ended))}:
        (finding,) = check_disk(tmp_path, ended)
        assert finding.status == "ok"


def test_a_directory_that_cannot_be_written(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o500)
    with permissions_hold():
        finding = the(check_disk(runs, probed(runs)), "disk-write")
    assert "Permission denied" in finding.found
    assert "chmod u+rwx" in finding.found
    runs.chmod(0o700)
    with permissions_hold():
        assert "disk-write" not in names(check_disk(runs, probed(runs)))


def test_space_and_speed(tmp_path):
    slow = {"bytes": 1 << 20, "seconds": 1.0, "fsync_seconds": 0.7}
    fast = {"bytes": 1 << 25, "seconds": 0.1, "fsync_seconds": 0.001}
    for free, write, found in (
        (50_000_000, slow, ["disk-full", "disk-slow"]),
        (1_000_000_000, fast, ["disk-little"]),
        (10**11, fast, ["ok"]),
    ):
        ended = result(space={"free": free}, write=write, existing=str(tmp_path))
        assert names(check_disk(tmp_path, ended)) == found


def test_a_file_server_that_hangs(tmp_path, monkeypatch):
    write_files(tmp_path, {"hanging.py": "import time\ndef main(given): time.sleep(60)\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with start_child("hanging", {}, timeout=0.5) as wait:
        ended = wait()
    (finding,) = check_disk(tmp_path, ended)
    assert finding.name == "disk-hangs"
    assert "its file server hangs" in finding.found
