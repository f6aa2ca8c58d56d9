"""`jtrain work`: real processes that join a run and leave it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import until
from test_server_processes import rows, start, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]
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
