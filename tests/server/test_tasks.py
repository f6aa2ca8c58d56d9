"""Tasks of a launcher as the processes of a run: who is what, and real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comparison import distance
from quick_study import config_of
from test_server_processes import LONG, last_state, start, wait_for_step

from jtrain.distributed.cluster import detect
from jtrain.distributed.port import free_port
from jtrain.errors import ConfigError
from jtrain.parallel import Server
from jtrain.parallel.strategies.server_modes import Async
from jtrain.server.process import find_task, serve_as_task

PS = {"chief": ["a:1"], "ps": ["b:1", "c:1"], "worker": ["d:1", "e:1"]}


def tf_config(kind: str, index: int, cluster=None) -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster or PS, "task": task})}


@pytest.mark.parametrize(
    ("task", "expected"),
    [(("chief", 0), ("run", 0)), (("ps", 1), ("shard", 1)), (("worker", 1), ("worker", 1))],
)
def test_tasks_of_tf_config_have_their_parts(task, expected):
    server = Server(engine="cluster", workers=2, shards=2)
    assert find_task(server, detect(tf_config(*task))) == expected


def test_another_number_of_servers_or_too_few_workers_are_refused():
    cluster = detect(tf_config("chief", 0))
    with pytest.raises(ConfigError, match=r"Set parallel\.shards=2\."):
        find_task(Server(engine="cluster", workers=2, shards=1), cluster)
    with pytest.raises(ConfigError, match=r"leave 2 workers, and 3 are needed\. Start 6 processes"):
        find_task(Server(engine="cluster", workers=3, shards=2), cluster)
    find_task(Server(engine="cluster", workers=3, shards=2, mode=Async()), cluster)


def test_the_engine_has_to_fit_the_launcher(study):
    own = config_of(study, ["parallel={kind: server}"])
    with pytest.raises(ConfigError, match=r"TF_CONFIG started 5 .*Set parallel\.engine=cluster"):
        serve_as_task(own, tf_config("worker", 0), print)
    assert serve_as_task(own, {}, print) is None
    theirs = config_of(study, ["parallel={kind: server, engine: cluster, shards: 2}"])
    with pytest.raises(ConfigError, match=r"Start 5 of them, or set parallel\.engine=local"):
        serve_as_task(theirs, {}, print)
    assert serve_as_task(theirs, tf_config("chief", 0), print) is None


class Tasks:
    """Four or more processes that a launcher would start, with TF_CONFIG."""

    def __init__(self, name: str, mode: str, *settings: str, workers: int = 2):
        tasks = {"chief": 1, "ps": 2, "worker": workers}
        address = lambda: f"127.0.0.1:{free_port()}"
        cluster = {kind: [address() for _ in range(n)] for kind, n in tasks.items()}
        server = f"parallel={{kind: server, engine: cluster, workers: 2, shards: 2, mode: {mode}}}"
        command = [sys.executable, "-m", "jtrain", "run", "configs/quick.yaml", f"name={name}"]
        self.processes = {}
        self.output = Path(f"{name}.txt")
        for kind, count in tasks.items():
            for index in range(count):
                environ = {**os.environ, **tf_config(kind, index, cluster)}
                with self.output.open("a") as output:
                    self.processes[kind, index] = subprocess.Popen(
                        [*command, server, *settings],
                        env=environ,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )

    def codes(self, timeout: float) -> set[int]:
        end = time.monotonic() + timeout
        try:
            return {p.wait(max(end - time.monotonic(), 0.1)) for p in self.processes.values()}
        except subprocess.TimeoutExpired:
            for each in self.processes.values():
                each.kill()
            raise AssertionError(self.output.read_text()) from None


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_tasks_take_the_steps_of_processes_that_the_run_starts():
    own = start("own", "{kind: sync}", *LONG)
    assert own.wait(timeout=250) == 0, Path("own.txt").read_text()
    tasks = Tasks("tasks", "{kind: sync}", *LONG)
    assert tasks.codes(250) == {0}, tasks.output.read_text()
    assert distance(last_state("tasks"), last_state("own")) <= 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_tasks_that_are_all_asked_to_end_save_and_end():
    values = "steps=100000", "evaluate.every=0", "checkpoint.every=0", "log.every=1"
    tasks = Tasks("run", "{kind: async}", *values)
    wait_for_step("run", 50, tasks.processes["chief", 0])
    for each in tasks.processes.values():
        each.send_signal(signal.SIGTERM)
    assert tasks.codes(60) <= {0, 75}, tasks.output.read_text()
    facts = json.loads(Path("runs/run/run.json").read_text())
    assert facts["status"] == "stopped"
    assert Path("runs/run/checkpoints", str(facts["step"]), "seal.json").exists()
