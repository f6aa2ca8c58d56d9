"""Parameter servers as processes, or on a real Ray: commands, SIGKILL, and `jtrain work`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from comparison import distance
from plain_environ import until
from quick_study import state_of

from jtrain.train.run_dir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]  # each starts five processes
SERVER = "parallel={kind: server, workers: 2, shards: 2, snapshot_every: 20, mode: %s}"
LONG = ("steps=300", "evaluate.every=0", "checkpoint.every=100", "log.every=1")


def start(name: str, mode: str, *settings: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jtrain", "run", "configs/quick.yaml", f"name={name}"]
    with open(f"{name}.txt", "a") as output:
        return subprocess.Popen(
            [*command, SERVER % mode, *settings], stdout=output, stderr=subprocess.STDOUT
        )


def rows(name: str) -> list[dict]:
    path = Path("runs", name, "metrics.jsonl")
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def wait_for_step(name: str, step: int, run: subprocess.Popen) -> None:
    until(lambda: any(row["step"] >= step for row in rows(name)), run)


def processes(name: str, role: str) -> list[int]:
    """Process ids of the workers or servers of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[1:4] == ["-m", "jtrain.server.process", role] and f"runs/{name}/" in words[5]:
            found.append(int(path.parent.name))
    return sorted(found)


def last_state(name: str):
    return state_of(RunDir(Path("runs", name)), 300)


def check_complete(name: str, run: subprocess.Popen) -> None:
    assert run.wait(timeout=250) == 0, Path(f"{name}.txt").read_text()
    steps = [row["step"] for row in rows(name) if "loss" in row]
    assert steps == list(range(1, 301)), "each step once"
    assert processes(name, "worker") + processes(name, "shard") == []


@pytest.mark.parametrize("role", ["worker", "shard"])
def test_a_killed_process_of_sync_changes_nothing(role):
    runs = {name: start(name, "{kind: sync}", *LONG) for name in ("calm", "killed")}
    wait_for_step("killed", 50, runs["killed"])
    os.kill(processes("killed", role)[-1], signal.SIGKILL)
    for name, run in runs.items():
        check_complete(name, run)
    assert "SIGKILL), and is started again" in Path("killed.txt").read_text()
    assert distance(last_state("killed"), last_state("calm")) == 0


def test_speed_has_the_clocks_and_the_bytes():
    run = start("run", "{kind: ssp, bound: 1}", *LONG)
    wait_for_step("run", 50, run)
    for server in processes("run", "shard"):
        assert b"glibc.malloc.hugetlb=1" in Path(f"/proc/{server}/environ").read_bytes()
    check_complete("run", run)
    last = json.loads(Path("runs/run/speed.jsonl").read_text().splitlines()[-1])
    assert sum(last["clock"].values()) >= 290
    assert sum(last["staleness"].values()) >= 290
    assert max(map(int, last["staleness"])) <= 3
    assert last["received"] > 0
    assert last["sent"] > 0
    assert last["updates_per_second"] > 0


SLOW = "0.03,0.03"  # seconds of a step, so that the run lasts until others have started


def work(run: str, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jtrain", "work", run, *options]
    with open("work.txt", "a") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def events(run: str) -> list[dict]:
    path = Path("runs", run, "workers.jsonl")
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def joined(run: str, pid: int) -> bool:
    return any(row["event"] == "joined" and row["pid"] == pid for row in events(run))


def left(run: str, pid: int) -> dict | None:
    return next((r for r in events(run) if r["event"] == "left" and r["pid"] == pid), None)


def test_a_worker_joins_is_asked_to_leave_and_another_is_killed(monkeypatch):
    monkeypatch.setenv("JTRAIN_SERVER_SLOW", SLOW)
    settings = ("steps=3000", "evaluate.every=0", "checkpoint.every=1000", "log.every=1")
    run = start("run", "{kind: async}", *settings, "parallel.max_workers=4")
    wait_for_step("run", 10, run)
    assert os.stat("runs/run/.server.json").st_mode & 0o077 == 0, "the token is the owner's"
    polite, killed = work("run"), work("runs/run")
    until(lambda: joined("run", polite.pid) and joined("run", killed.pid), run)
    at = rows("run")[-1]["step"]
    wait_for_step("run", at + 200, run)
    polite.send_signal(signal.SIGTERM)
    killed.kill()
    assert polite.wait(timeout=60) == 75
    killed.wait()
    until(lambda: left("run", polite.pid) and left("run", killed.pid), run)
    asked, broken = left("run", polite.pid), left("run", killed.pid)
    assert asked is not None
    assert asked["why"] == "was asked to"
    assert asked["leases"] > 0
    assert broken is not None
    assert broken["why"] == "its connection broke"
    last = work("run")
    assert run.wait(timeout=250) == 0, Path("run.txt").read_text()
    assert last.wait(timeout=200) == 0, Path("work.txt").read_text()
    steps = [row["step"] for row in rows("run") if "loss" in row]
    assert steps == list(range(1, 3001)), "each step once"
    assert not Path("runs/run/.server.json").exists()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_actor_that_is_killed_comes_back_and_the_state_is_that_of_a_local_run(monkeypatch):
    pytest.importorskip("ray", reason="NOT TESTED: pip install 'jtrain[ray]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    local = start("local", "{kind: sync}", *LONG)
    check_complete("local", local)
    run = start("run", "{kind: sync}", *LONG, "parallel.engine=ray")
    wait_for_step("run", 50, run)
    os.kill(parent(processes("run", "shard")[-1]), signal.SIGKILL)
    check_complete("run", run)
    said = Path("run.txt").read_text()
    assert "its Ray actor died" in said
    assert distance(last_state("run"), last_state("local")) == 0
