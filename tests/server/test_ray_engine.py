"""Servers and workers on a real Ray: an actor is killed, and the state is that of a local run."""

import os
import signal
from pathlib import Path

import pytest
from comparison import distance
from test_server_processes import LONG, check_complete, processes, start, state_of, wait_for_step


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.usefixtures("home")
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
    assert distance(state_of("run"), state_of("local")) == 0
