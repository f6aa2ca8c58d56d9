"""Servers and workers on a real Ray: the state of a local run, an actor killed, the run killed."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from comparison import distance
from quick_study import write_study
from test_server_processes import LONG, check_complete, processes, start, state_of, wait_for_step

from jtrain.errors import UserError
from jtrain.parallel import Server
from jtrain.server.ray_engine import open_ray_engine


def test_ray_that_is_missing_is_named_with_the_command(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    without = lambda name, *rest: None if name == "ray" else found(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with (
        pytest.raises(
            UserError, match=r"pip install 'jtrain\[ray\]', or set parallel\.engine=local"
        ),
        open_ray_engine(tmp_path / "config.yaml", Server(engine="ray")),
    ):
        pass


@pytest.fixture
def study(tmp_path, monkeypatch):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed; pip install 'jtrain[ray]'")
    write_study(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    return tmp_path


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_an_actor_that_is_killed_comes_back_and_the_state_is_that_of_a_local_run(study):
    del study
    local = start("local", "{kind: sync}", *LONG)
    check_complete("local", local)
    run = start("run", "{kind: sync}", *LONG, "parallel.engine=ray")
    wait_for_step("run", 50, run)
    os.kill(parent(processes("run", "shard")[-1]), signal.SIGKILL)
    check_complete("run", run)
    said = Path("run.txt").read_text()
    assert "its Ray actor died" in said
    assert distance(state_of("run"), state_of("local")) == 0
