"""2 and 4 processes of 1, 2 and 4 devices, under four layouts, take the steps of one device."""

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from comparison import distance
from process_runs import TINY

from jtrain.checkpoint import CheckpointManager
from jtrain.config.resolve import resolve
from jtrain.core.pytree import named_leaves
from jtrain.distributed.launcher import launch
from jtrain.train.hooks.log import read_metrics
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
    rows, expected = read_metrics(run / "metrics.jsonl"), read_metrics(alone / "metrics.jsonl")
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
