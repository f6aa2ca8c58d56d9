"""Real jobs whose tasks are the processes of a run on parameter servers, by the page's command."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from slurm_jobs import Script, output, submit
from test_slurm_runs import until

from chaos.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slow
FOUR = ("--nodes=2", "--ntasks-per-node=2")
SHORT = "steps=60 evaluate.every=0 checkpoint.every=20"


def command() -> str:
    """Return the line of the page that starts the tasks, for the tests' study."""
    page = Path(__file__).parents[3] / "docs" / "clusters" / "slurm.md"
    (line,) = re.findall(r"^srun .*parallel\.engine=cluster.*$", page.read_text(), re.M)
    line = line.replace("configs/digits.yaml name=served", "configs/hurt.yaml")
    workers = line.replace("parallel.workers=6", "parallel.workers=2")
    return workers.replace("parallel.shards=2", "parallel.shards=1")


def test_tasks_are_the_run_its_servers_and_its_workers(script: Script, home: Path):
    code, said = script(f"{command()} {SHORT}", *FOUR)
    assert code == 0, said
    run = home / "runs" / "hurt"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 61))
    came = [json.loads(line) for line in (run / "workers.jsonl").read_text().splitlines()]
    assert {row["worker"] for row in came} == {0, 1}
    assert json.loads((run / "run.json").read_text())["status"] == "done"


def test_the_job_ends_with_the_task_of_the_run_and_another_job_resumes_it(
    slurm: SlurmCluster, home: Path
):
    lines = f"#!/bin/bash\n{command()} steps=100000 evaluate.every=0 checkpoint.every=20"
    number = submit(slurm, home, lines, *FOUR)
    checkpoints = home / "runs" / "hurt" / "checkpoints"
    until(slurm, number, lambda: any(checkpoints.glob("*/seal.json")))
    tasks = slurm.tasks("jtrain run", number)
    assert sorted(tasks) == [0, 1, 2, 3]
    os.kill(tasks[0], signal.SIGKILL)
    assert slurm.wait(number).state == "FAILED"
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in tasks.values()):
        assert time.monotonic() < deadline, "no task is left"
        time.sleep(0.1)
    number = submit(slurm, home, lines.replace("steps=100000", "steps=2000"), *FOUR)
    assert slurm.wait(number).code == 0, output(home, number)
    assert "resumes from step" in output(home, number)
