"""Processes of several devices take the steps of one, stop at one step and go on as others."""

import contextlib
import ipaddress
import itertools
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
from comparison import assert_close, distance
from listening import descendants, listening
from plain_environ import plain_environ
from process_runs import TINY
from quick_study import SLOW, at_home, trained, write_study

from jtrain.checkpoint import CheckpointManager
from jtrain.config.resolve import resolve
from jtrain.core.pytree import named_leaves
from jtrain.distributed.launcher import launch
from jtrain.io.jsonl import read_rows
from jtrain.train.program import set_up

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "llama2_7b.yaml"
SCRIPT = ROOT / "tests" / "process_runs.py"
LAYOUTS = {
    "mirrored": "parallel.kind=mirrored",
    "shard_map": "parallel.kind=mirrored parallel.impl=shard_map",
    "fsdp": "parallel.kind=fsdp parallel.min_size=0",
    "data-fsdp": "parallel.kind=sharded parallel.data=2 parallel.fsdp=0 parallel.min_size=0",
    "fsdp-tensor": "parallel.kind=sharded parallel.fsdp=0 parallel.tensor=2 parallel.min_size=0",
}
BATCH = 16  # as process_runs has it
SIZES = [
    pytest.param(*size, marks=pytest.mark.thorough if size == (2, 2) else pytest.mark.slow)
    for size in itertools.product((2, 4), (1, 2, 4))
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the result of one device."""
    home = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        launched(1, 1, 0, {"alone": "parallel.kind=single"})
    return home / "runs" / "alone"


def reads(runs: Path) -> list[list[tuple[str, ...]]]:
    """Return the rows by process and by batch, in the order in which each was read first.

    A line may be several batches, of one call; and the first of the processes reads a batch more
    than the others, to describe the program that it compiled.
    """
    files = sorted(runs.glob("read-*.txt"))
    size = BATCH // len(files)
    lines = [[line.split() for line in file.read_text().splitlines()] for file in files]
    parts = [
        [tuple(line[at : at + size]) for line in read for at in range(0, len(line), size)]
        for read in lines
    ]
    return [list(dict.fromkeys(part)) for part in parts]


def launched(processes: int, devices: int, stop: int, layouts: dict[str, str]) -> None:
    runs = [f"{name} {settings}" for name, settings in layouts.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SCRIPT.parent), *sys.path]))
        command = [sys.executable, "-W", "error", str(SCRIPT), str(CONFIG), str(stop), *runs]
        assert launch(command, processes=processes, devices=devices) == 0


def params(run: Path, last: int = 4) -> list[np.ndarray]:
    """Restore the checkpoint after the last step to one device."""
    config = resolve(CONFIG, [*TINY, "parallel={kind: single}"]).config
    with CheckpointManager(run / "checkpoints") as checkpoints:
        assert checkpoints.newest() == last
        state = checkpoints.restore(last, set_up(config).resolved.abstract_state)
    return [np.asarray(leaf) for leaf in named_leaves(state.params).values()]


def check_same(run: Path, alone: Path) -> None:
    rows, expected = read_rows(run / "metrics.jsonl"), read_rows(alone / "metrics.jsonl")
    assert [list(row) for row in rows] == [list(row) for row in expected], "each row once"
    for row, other in zip(rows, expected, strict=True):
        for name, number in row.items():
            assert number == pytest.approx(other[name], rel=1e-6), (run.name, row["step"], name)
    assert distance(params(run), params(alone)) <= 1e-6


@pytest.mark.parametrize(("processes", "devices"), SIZES)
def test_take_the_steps_of_one_device(processes, devices, alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launched(processes, devices, 0, LAYOUTS)
    for name in LAYOUTS:
        check_same(tmp_path / "runs" / name, alone)
    parts, (whole,) = reads(tmp_path / "runs"), reads(alone.parent)
    assert len(parts) == processes
    together = [sum(read, ()) for read in zip(*parts, strict=True)]
    assert together == whole, "the order of the data"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [((2, 2), (4, 1)), ((4, 1), (2, 4)), ((4, 2), (1, 2))]
)
def test_another_number_of_processes_resumes(first, second, alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for (processes, devices), stop in ((first, 2), (second, 0)):
        launched(processes, devices, stop, LAYOUTS)
    for name in LAYOUTS:
        check_same(tmp_path / "runs" / name, alone)


PATIENCE = 240  # seconds; alone on two cores it takes about 10
FEW = ("steps=40", "checkpoint.every=0", "evaluate.every=5")
VALUES = (*FEW, "optimizer.kind=sgd")
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
    write_study(home, SLOW)
    (home / "slow").touch()
    options = ["--processes", "2", "--devices", "2"]
    words = ["run", "configs/quick.yaml", *VALUES, *SPLIT]
    env = plain_environ()
    output = home / "output.txt"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "jtrain", "launch", *options, *words],
        cwd=home,
        env=env | {"JAX_COMPILATION_CACHE_DIR": str(compiled)},
        stdout=(file := output.open("w")),
        stderr=subprocess.STDOUT,
    )
    listened, asked, deadline = set(), False, time.monotonic() + PATIENCE
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline
            listened |= listening(process.pid)
            if not asked and len(read_rows(home / "runs" / "quick" / "metrics.jsonl")) > 5:
                os.kill(second_of(process.pid), signal.SIGTERM)
                asked = True
            time.sleep(0.05)
        return Stopped(home, process.returncode, output.read_text(), listened)
    finally:
        file.close()
        process.kill()
        process.wait()
        (home / "slow").unlink()


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
    rows = {f"{name}.jsonl" for name in ("metrics", "speed", "time", "steps")}
    assert names == {*rows, "config.yaml", "run.json", "log.txt", "log-1.txt", "checkpoints"}
    assert stopped.said.count("resumes from step") == 1
    assert "process 0 of 2 (jtrain) at 127.0.0.1" in stopped.said
    assert "process 1 of 2" not in stopped.said
    assert "process 1 of 2" in (stopped.run / "log-1.txt").read_text()
    steps = [row["step"] for row in read_rows(stopped.run / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), "each row once"


@pytest.mark.thorough
def test_nothing_listens_beyond_the_loopback(stopped: Stopped):
    assert stopped.listened, "the coordinator was seen"
    assert all(ipaddress.ip_address(each).is_loopback for each in stopped.listened)


@pytest.mark.thorough
def test_one_process_goes_on_to_what_an_unbroken_run_comes_to(
    stopped: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path
):
    write_study(tmp_path, SLOW)
    at_home(tmp_path, monkeypatch, compiled)
    unbroken = read_rows(trained("configs/quick.yaml", *VALUES).directory.metrics)
    monkeypatch.chdir(stopped.home)
    there = read_rows(stopped.run / "metrics.jsonl")
    step = json.loads((stopped.run / "run.json").read_text())["step"]
    outcome = trained("configs/quick.yaml", *VALUES)
    assert (outcome.status, outcome.step) == ("done", 40)
    assert outcome.directory.facts()["readers"] == [[0, 2], [step, 1]]
    rows = read_rows(outcome.directory.metrics)
    assert rows[: len(there)] == there
    assert [list(row) for row in rows] == [list(row) for row in unbroken]
    numbers = lambda rows: np.array([x for row in rows for x in row.values()])
    assert_close(numbers(rows), numbers(unbroken), 1e-5)
