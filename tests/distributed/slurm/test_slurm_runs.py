"""Runs under Slurm: trained as one run, asked to end, requeued by the script of the page."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from slurm_jobs import Script, output, submit, write_code

from chaos.slurm.cluster import PATIENCE, SlurmCluster
from chaos.slurm.recipe import recipe

RUN = "jtrain run configs/hurt.yaml parallel.kind=mirrored"
TWO = ("--nodes=2", "--ntasks-per-node=1")
BOTH_75 = [("node1", "0", "75"), ("node2", "1", "75")]
# Each file that a save writes takes longer, so that a second signal comes during the save.
SLOW_SAVES = """
import os
from jtrain.io import atomic_write
fsync = os.fsync
os.fsync = lambda file: (time.sleep(0.4), fsync(file))
"""


def codes(said: str) -> list[tuple[str, ...]]:
    """Return node, number and exit code of the tasks that ended by a code other than 0."""
    return sorted(re.findall(r"srun: error: (\w+): task (\d): Exited with exit code (\d+)", said))


def facts(home: Path) -> dict:
    """Return the contents of run.json; {} before there is one."""
    file = home / "runs" / "hurt" / "run.json"
    return json.loads(file.read_text()) if file.exists() else {}


def is_sealed(home: Path) -> bool:
    """Return whether the step that the run stopped at has a checkpoint."""
    found = facts(home)
    folder = home / "runs" / "hurt" / "checkpoints" / f"{found['step']}"
    return found["status"] == "stopped" and (folder / "seal.json").exists()


def until(slurm: SlurmCluster, number: int, condition: Callable[[], bool]) -> None:
    """Wait for a condition while a job runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert slurm.job(number).state in {"PENDING", "RUNNING"}, "the job has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_steps(home: Path) -> bool:
    file = home / "runs" / "hurt" / "metrics.jsonl"
    return file.exists() and file.read_text().count("\n") > 3


@pytest.mark.thorough
def test_two_tasks_train_as_one_run_and_save_when_they_are_asked_to_end(
    slurm: SlurmCluster, home: Path
):
    lines = f"#!/bin/bash\nsrun --kill-on-bad-exit=1 {RUN} steps=100000\necho code $?"
    number = submit(slurm, home, lines, *TWO)
    until(slurm, number, lambda: has_steps(home))
    slurm.command("scancel", "--signal=TERM", f"{number}")
    slurm.wait(number)
    said = output(home, number)
    assert f"process 0 of 2 (Slurm) at node1:{61440 + number}" in said
    assert said.count("resumes from step") == 1, "one process prints"
    assert codes(said) == BOTH_75, said
    assert "code 75\n" in said
    assert is_sealed(home)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--kill-on-bad-exit=1", "--kill-on-bad-exit=0"])
def test_a_second_signal_during_the_save_of_several_tasks_changes_nothing(
    slurm: SlurmCluster, home: Path, option: str
):
    write_code(home, "\n\nclass Hurt", f"\n{SLOW_SAVES}\n\nclass Hurt")
    number = submit(
        slurm,
        home,
        f"#!/bin/bash\nsrun {option} {RUN} steps=100000 checkpoint.every=0\necho code $?",
        *TWO,
    )
    until(slurm, number, lambda: has_steps(home))
    saving = lambda: any((home / "runs" / "hurt" / "checkpoints").glob("*.saving"))
    slurm.command("scancel", "--signal=TERM", f"{number}")
    began = time.monotonic()
    until(slurm, number, lambda: saving() and time.monotonic() > began + 2.5)
    slurm.command("scancel", "--signal=TERM", f"{number}")
    assert saving(), "the second signal came during the save"
    slurm.wait(number)
    said = output(home, number)
    assert codes(said) == BOTH_75, said
    assert is_sealed(home)


@pytest.mark.slow
def test_a_cancelled_job_saves_before_it_is_killed(slurm: SlurmCluster, home: Path):
    number = submit(slurm, home, f"#!/bin/bash\nsrun {RUN} steps=100000", *TWO)
    until(slurm, number, lambda: has_steps(home))
    slurm.command("scancel", f"{number}")
    assert slurm.wait(number).state == "CANCELLED"
    deadline = time.monotonic() + 60
    while facts(home)["status"] == "running":
        assert time.monotonic() < deadline, output(home, number)
        time.sleep(0.1)
    assert is_sealed(home)


@pytest.mark.slow
def test_several_tasks_on_one_node_train_as_one_run(script: Script, home: Path):
    code, said = script(f"srun {RUN} steps=5", "--nodes=1", "--ntasks=2")
    assert code == 0, said
    assert "process 0 of 2 (Slurm) at node1:" in said or "at node2:" in said
    assert facts(home)["status"] == "done"


@pytest.mark.slow
def test_each_job_of_an_array_is_a_run_of_its_own(slurm: SlurmCluster, home: Path):
    (text,) = [block for block in blocks() if "--array" in block]
    text = text.replace("configs/shakespeare.yaml", "configs/hurt.yaml steps=3")
    number = submit(slurm, home, text)
    for index in range(3):
        assert slurm.wait(number + index).code == 0
    rates = {}
    for path in (home / "runs").iterdir():
        found = YAML(typ="safe").load((path / "config.yaml").read_text())
        rates[path.name] = found["optimizer"]["lr"]
    assert rates == {"lr-0": 1e-4, "lr-1": 3e-4, "lr-2": 1e-3}


def blocks() -> list[str]:
    """Return the scripts of the page."""
    page = Path(__file__).parents[3] / "docs" / "clusters" / "slurm.md"
    return re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.slow
def test_a_mistake_in_one_task_is_requeued_three_times_at_most(slurm: SlurmCluster, home: Path):
    mistake = (
        'if os.environ["SLURM_PROCID"] == "1":\n            raise jt.ConfigError("on purpose")'
    )
    write_code(home, "        def loss(", f"        {mistake}\n\n        def loss(")
    text = recipe("configs/hurt.yaml parallel.kind=mirrored", "hurt", nodes="2", gpus_per_node="")
    number = submit(slurm, home, text, "--time=00:20:00")
    job = slurm.wait(number, 3 * PATIENCE)
    assert job.state == "FAILED"
    assert job.restarts == 3
    assert output(home, number).count("on purpose") >= 4
