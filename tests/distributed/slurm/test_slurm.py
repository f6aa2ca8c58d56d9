"""A real Slurm of two nodes on this machine: steps, exit codes, runs, servers, and a mistake."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plain_environ import until as wait_until

from chaos.launched import CODE, home_of
from chaos.slurm.cluster import PATIENCE, SlurmCluster, running_cluster
from chaos.slurm.packages import PACKAGES_FOLDER, NoSlurmError
from chaos.slurm.recipe import recipe

Script = Callable[..., tuple[int, str]]
"""Function that runs lines of bash as a job, and returns its exit code and its output."""


def submit(slurm: SlurmCluster, home: Path, text: str, *options: str, **environ: str) -> int:
    """Submit a batch script, and return the number of its job."""
    (home / "job.sh").write_text(text)
    compiled = slurm.folder / "compiled"  # shared by all tests
    usual = {"JAX_COMPILATION_CACHE_DIR": f"{compiled}", "READ": "0.02 0.02", "COMPILE": "0"}
    environ = usual | {"PYTHONWARNINGS": "error"} | environ
    return slurm.submit(home / "job.sh", *options, cwd=home, environ=environ)


def output(home: Path, number: int) -> str:
    """Return what a job has written so far."""
    file = home / f"slurm-{number}.out"
    return file.read_text() if file.exists() else ""


@pytest.fixture(scope="module")
def slurm(pytestconfig, tmp_path_factory) -> Iterator[SlurmCluster]:
    """A controller and two nodes; the packages stay in pytest's cache, or in PACKAGES_FOLDER."""
    assert pytestconfig.cache is not None
    cached = os.environ.get(PACKAGES_FOLDER) or pytestconfig.cache.mkdir("slurm")
    try:
        with running_cluster(Path(cached), tmp_path_factory.mktemp("slurm") / "it") as cluster:
            yield cluster
    except NoSlurmError as reason:
        pytest.skip(f"nothing of Slurm is tested: {reason}")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a study of 60 short steps, `configs/hurt.yaml`."""
    return home_of(tmp_path, "home")


@pytest.fixture
def script(slurm: SlurmCluster, home: Path) -> Script:
    """Run lines of bash as a job in `home`, and return its exit code and its output."""

    def run(lines: str, *options: str, **environ: str) -> tuple[int, str]:
        number = submit(slurm, home, f"#!/bin/bash\n{lines}\n", *options, **environ)
        job = slurm.wait(number)
        return job.code, output(home, number)

    return run


DETECT = (
    "python -c 'import json, os; from jtrain.distributed.cluster import detect; "
    "print(json.dumps(detect(os.environ).plain()))'"
)


def detected(said: str) -> list[dict]:
    """Return the clusters that the tasks have found, by their index."""
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda each: each["index"])


STEPS = {
    "two nodes": (["--nodes=2", "--ntasks-per-node=1"], f"srun {DETECT}", 2),
    "components of a step": (["--nodes=2", "--ntasks-per-node=2"],
        f"srun -n1 -w node1 {DETECT} : -n2 -w node2 {DETECT}", 3),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_every_task_of_a_step_finds_its_index_and_the_first_node(script, case):
    options, step, processes = case
    code, said = script(f"echo job $SLURM_JOB_ID\n{step}", *options)
    assert code == 0, said
    found = detected(said)
    assert [each["index"] for each in found] == list(range(processes))
    assert {each["processes"] for each in found} == {processes}
    job = re.search(r"^job (\d+)$", said, re.MULTILINE)
    assert job, said
    assert {each["coordinator"] for each in found} == {f"node1:{61440 + int(job[1])}"}


RUN = "jtrain run configs/hurt.yaml parallel.kind=mirrored"
TWO = ("--nodes=2", "--ntasks-per-node=1")
BOTH_75 = [("node1", "0", "75"), ("node2", "1", "75")]


def codes(said: str) -> list[tuple[str, ...]]:
    """Return node, number and exit code of the tasks that ended by a code other than 0."""
    return sorted(re.findall(r"srun: error: (\w+): task (\d): Exited with exit code (\d+)", said))


def is_sealed(home: Path) -> bool:
    """Return whether the step that the run stopped at has a checkpoint."""
    run = home / "runs" / "hurt"
    found = json.loads((run / "run.json").read_text())
    sealed = (run / "checkpoints" / f"{found['step']}" / "seal.json").exists()
    return found["status"] == "stopped" and sealed


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
def test_two_tasks_train_as_one_run_and_save_when_they_are_asked_to_end(slurm, home):
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
def test_a_mistake_in_one_task_is_requeued_three_times_at_most(slurm: SlurmCluster, home: Path):
    mistake = (
        'if os.environ["SLURM_PROCID"] == "1":\n            raise jt.ConfigError("on purpose")'
    )
    begin = "        def loss("
    assert CODE.count(begin) == 1
    code = CODE.replace(begin, f"        {mistake}\n\n{begin}")
    (home / "experiments" / "hurt.py").write_text(code)
    text = recipe("configs/hurt.yaml parallel.kind=mirrored", "hurt", nodes="2", gpus_per_node="")
    number = submit(slurm, home, text, "--time=00:20:00")
    job = slurm.wait(number, 3 * PATIENCE)
    assert job.state == "FAILED"
    assert job.restarts == 3
    assert output(home, number).count("on purpose") >= 4


FOUR = ("--nodes=2", "--ntasks-per-node=2")


def command() -> str:
    """Return the line of the page that starts the tasks, for the tests' study."""
    page = Path(__file__).parents[3] / "docs" / "clusters.md"
    (line,) = re.findall(r"^srun .*parallel\.engine=cluster.*$", page.read_text(), re.M)
    line = line.replace("configs/digits.yaml name=served", "configs/hurt.yaml")
    workers = line.replace("parallel.workers=6", "parallel.workers=2")
    return workers.replace("parallel.shards=2", "parallel.shards=1")


@pytest.mark.slow
def test_the_job_ends_with_the_task_of_the_run_and_another_job_resumes_it(slurm, home):
    lines = f"#!/bin/bash\n{command()} steps=100000 evaluate.every=0 checkpoint.every=20"
    number = submit(slurm, home, lines, *FOUR)
    checkpoints = home / "runs" / "hurt" / "checkpoints"
    until(slurm, number, lambda: any(checkpoints.glob("*/seal.json")))
    tasks = slurm.tasks("jtrain run", number)
    assert sorted(tasks) == [0, 1, 2, 3]
    os.kill(tasks[0], signal.SIGKILL)
    assert slurm.wait(number).state == "FAILED"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in tasks.values()))
    number = submit(slurm, home, lines.replace("steps=100000", "steps=2000"), *FOUR)
    assert slurm.wait(number).code == 0, output(home, number)
    assert "resumes from step" in output(home, number)
