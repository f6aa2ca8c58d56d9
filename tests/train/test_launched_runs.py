"""A config under `jtrain launch`: stopped at one process, resumed with another number of them."""

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from comparison import assert_close
from listening import descendants, listening
from plain_environ import plain_environ
from quick_study import CODE, at_home, trained, write_study

from jtrain.train.hooks.log import read_metrics

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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
