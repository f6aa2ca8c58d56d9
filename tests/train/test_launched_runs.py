"""A config under `jtrain launch`: stopped at one process, resumed with another number of them."""

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from comparison import assert_close
from listening import descendants, listening
from plain_environ import plain_environ
from quick_study import CODE, at_home, trained, write_study

from jtrain.cli import main
from jtrain.distributed.launcher.launch import worker_environment
from jtrain.distributed.launcher.port import free_port
from jtrain.train.hooks.metrics import read_metrics

PATIENCE = 240  # seconds; alone on two cores it takes about 10
SLOW = """

class Slow(Arrays):
    def __getitem__(self, indices):
        time.sleep(float(os.environ.get("NAP", 0)))
        return super().__getitem__(indices)
"""
STUDY = "import os\nimport time\n" + CODE.replace("    return Arrays(", "    return Slow(").replace(
    "\n\n@jt.configclass\nclass Data", SLOW + "\n\n@jt.configclass\nclass Data"
)
VALUES = (
    "steps=40",
    "checkpoint.every=0",
    "evaluate.every=5",
    "log.leaves=5",
    "optimizer.kind=sgd",
)
SPLIT = ("parallel.kind=fsdp", "parallel.min_size=0")


class Stopped(NamedTuple):
    """A run in two processes that was asked to end, by a signal to the second of them."""

    home: Path
    code: int
    said: str
    listened: set[str]

    @property
    def run(self) -> Path:
        return self.home / "runs" / "quick"


def second_of(launcher: int) -> int:
    """Return the second process: not the greater number, since the kernel begins anew."""
    for pid in descendants(launcher) - {launcher}:
        with contextlib.suppress(OSError):  # ended since it was listed
            if b"JTRAIN_PROCESS=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise AssertionError("there is no second process")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Stopped:
    home = tmp_path_factory.mktemp("launched")
    write_study(home, STUDY)
    options = ["--processes", "2", "--devices", "2"]
    words = ["run", "configs/quick.yaml", *VALUES, *SPLIT]
    env = plain_environ()
    output = home / "output.txt"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "jtrain", "launch", *options, *words],
        cwd=home,
        env=env | {"NAP": "0.1", "JAX_COMPILATION_CACHE_DIR": str(compiled)},
        stdout=(file := output.open("w")),
        stderr=subprocess.STDOUT,
    )
    listened, asked, deadline = set(), False, time.monotonic() + PATIENCE
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline
            listened |= listening(process.pid)
            if not asked and len(read_metrics(home / "runs" / "quick" / "metrics.jsonl")) > 5:
                os.kill(second_of(process.pid), signal.SIGTERM)
                asked = True
            time.sleep(0.05)
        return Stopped(home, process.returncode, output.read_text(), listened)
    finally:
        file.close()
        process.kill()
        process.wait()


@pytest.mark.thorough
def test_a_signal_to_one_process_stops_all_at_one_step(stopped: Stopped):
    assert stopped.code == 75, stopped.said
    stands = json.loads((stopped.run / "run.json").read_text())
    assert stands["status"] == "stopped"
    assert 5 < stands["step"] < 40
    assert stands["readers"] == [[0, 2]]
    assert "asked to end (a signal to one of the processes)" in stopped.said
    again = " ".join(["jtrain launch --processes 2 --devices 2 run configs/quick.yaml", *VALUES])
    assert f"next:  {again}" in stopped.said
    header = (stopped.run / "config.yaml").read_text().splitlines()[0]
    assert header.endswith("launch --processes 2 --devices 2 run runs/quick/config.yaml")
    steps = [int(path.name) for path in (stopped.run / "checkpoints").iterdir()]
    assert max(steps) == stands["step"]


def test_one_process_speaks_and_writes(stopped: Stopped):
    names = {path.name for path in stopped.run.iterdir()}
    rows = {f"{name}.jsonl" for name in ("metrics", "speed", "time", "leaves", "steps", "compiles")}
    assert names == {*rows, "config.yaml", "run.json", "log.txt", "log-1.txt", "checkpoints"}
    assert stopped.said.count("resumes from step") == 1
    assert "process 0 of 2 (jtrain) at 127.0.0.1" in stopped.said
    assert "process 1 of 2" not in stopped.said
    assert "process 1 of 2" in (stopped.run / "log-1.txt").read_text()
    steps = [row["step"] for row in read_metrics(stopped.run / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), "each row once"


def test_nothing_listens_beyond_the_loopback(stopped: Stopped):
    assert stopped.listened, "the coordinator was seen"
    assert all(ipaddress.ip_address(each).is_loopback for each in stopped.listened)


@pytest.mark.thorough
def test_one_process_goes_on_to_what_an_unbroken_run_comes_to(
    stopped: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path
):
    write_study(tmp_path, STUDY)
    at_home(tmp_path, monkeypatch, compiled)
    unbroken = read_metrics(trained("configs/quick.yaml", *VALUES).directory.metrics)
    monkeypatch.chdir(stopped.home)
    there = read_metrics(stopped.run / "metrics.jsonl")
    step = json.loads((stopped.run / "run.json").read_text())["step"]
    outcome = trained("configs/quick.yaml", *VALUES)
    assert (outcome.status, outcome.step) == ("done", 40)
    assert outcome.directory.facts()["readers"] == [[0, 2], [step, 1]]
    rows = read_metrics(outcome.directory.metrics)
    assert rows[: len(there)] == there
    assert [list(row) for row in rows] == [list(row) for row in unbroken]
    numbers = lambda rows: np.array([x for row in rows for x in row.values()])
    assert_close(numbers(rows), numbers(unbroken), 1e-5)


@pytest.mark.slow
def test_a_step_of_two_processes_taken_by_one_blames_no_device(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch, compiled: Path, capfd
):
    at_home(stopped.home, monkeypatch, compiled)
    main(["replay", "quick", "--step", "4", "--only-again"])
    said = capfd.readouterr().out
    assert "step 4, batch 3" in said
    assert "a device computes wrongly" not in said
    assert "DIFFERENT" not in said or "The likely cause: processes: 2 then, 1 now" in said
    assert "jtrain launch --processes 2 replay quick --step 4" in said


def begun(home: Path, compiled: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Start two processes as `srun` does."""
    where = f"127.0.0.1:{free_port()}"
    plain = plain_environ()
    plain["JAX_COMPILATION_CACHE_DIR"] = str(compiled)
    return [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "jtrain", *words],
            cwd=home,
            env=worker_environment(plain, where, index, 2, 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def alike(home: Path, compiled: Path, *words: str) -> list[tuple[int, str, str]]:
    """Return exit code, stdout and stderr of two processes started as by `srun`."""
    processes = begun(home, compiled, *words)
    try:
        said = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(each.returncode, *two) for each, two in zip(processes, said, strict=True)]


@pytest.mark.thorough
def test_one_process_says_what_all_have_measured(stopped: Stopped, compiled: Path):
    ends = alike(stopped.home, compiled, "eval", "quick", *SPLIT, "--json")
    assert [code for code, *_ in ends] == [0, 0], ends
    (_, first, _), (_, second, _) = ends
    assert json.loads(first)["valid"]["rows"] == 50
    assert second == ""


@pytest.mark.thorough
def test_more_devices_than_rows_are_refused_by_all_processes(stopped: Stopped, compiled: Path):
    words = ["run", "configs/quick.yaml", "name=few", "batch=2", *SPLIT]
    for code, _, complaints in alike(stopped.home, compiled, *words):
        assert code == 2
        assert "batch: 2 rows do not divide into 4 devices x 1 microbatches" in complaints
        assert "Nearest: 4 (batch=4)" in complaints
        assert "Traceback" not in complaints
    assert not (stopped.home / "runs" / "few").exists()


def keep_asking(processes: list[subprocess.Popen[str]]) -> None:
    """End the remaining processes when one has ended, as `srun --kill-on-bad-exit` does."""
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < deadline
        if any(process.poll() for process in processes):
            for process in processes:
                process.send_signal(signal.SIGTERM)
        time.sleep(0.01)


@pytest.mark.sampled(3)
@pytest.mark.thorough
@pytest.mark.parametrize("twice", [(signal.SIGTERM, 0), (signal.SIGINT, 1), (signal.SIGHUP, 0)])
def test_signals_close_together_to_processes_of_a_cluster_are_one(
    tmp_path: Path, compiled: Path, monkeypatch, twice: tuple[signal.Signals, int]
):
    write_study(tmp_path, STUDY)
    monkeypatch.setenv("NAP", "0.05")
    number, to = twice
    words = ["run", "configs/quick.yaml", *VALUES, *SPLIT, "steps=100000"]
    processes = begun(tmp_path, compiled, *words)
    try:
        deadline = time.monotonic() + PATIENCE
        while len(read_metrics(tmp_path / "runs" / "quick" / "metrics.jsonl")) < 5:
            assert time.monotonic() < deadline
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.02)
        for _ in range(2):
            processes[to].send_signal(number)
            time.sleep(0.02)
        said = [threading.Thread(target=process.communicate) for process in processes]
        for thread in said:  # reads what they say
            thread.start()
        keep_asking(processes)
        for thread in said:
            thread.join()
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [75, 75]
    stands = json.loads((tmp_path / "runs" / "quick" / "run.json").read_text())
    assert stands["status"] == "stopped"
    folder = tmp_path / "runs" / "quick" / "checkpoints" / f"{stands['step']}"
    assert (folder / "seal.json").exists()
