import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import counting
import numpy as np
import pytest

from jtrain.errors import CheckpointError, LossError
from jtrain.train.hooks import metrics
from jtrain.train.hooks.metrics import MetricsFile


def written(path, *, resumed_at=None, stop=6):
    """Write rows up to `stop`, as a run that evaluates every second step."""
    file = MetricsFile(path, every=1, resumed_at=resumed_at)
    for step in range((resumed_at or 0) + 1, stop + 1):
        file.on_numbers(step, {"loss": 1 / step, "grad_norm": step / 7})
        if step % 2 == 0:
            file.row(step, "valid", {"loss": 2 / step, "rows": 5})
    file.close()
    return path.read_bytes()


def test_rows_are_json_and_come_back(tmp_path):
    lines = written(tmp_path / "m.jsonl", stop=2).decode().splitlines()
    assert lines == [
        '{"step": 1, "loss": 1.0, "grad_norm": 0.14285714285714285}',
        '{"step": 2, "loss": 0.5, "grad_norm": 0.2857142857142857}',
        '{"step": 2, "valid/loss": 1.0, "valid/rows": 5}',
    ]
    assert metrics.read_metrics(tmp_path / "m.jsonl") == [json.loads(line) for line in lines]
    assert metrics.read_results(tmp_path / "m.jsonl", "valid") == {2: {"loss": 1.0, "rows": 5}}
    assert metrics.read_results(tmp_path / "m.jsonl", "")[1] == {"loss": 1.0, "grad_norm": 1 / 7}
    assert metrics.read_metrics(tmp_path / "none.jsonl") == []


def test_a_loop_writes_a_row_a_cadence(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", every=4)
    counting.run([file], stop=10)
    file.close()
    found = metrics.read_metrics(tmp_path / "m.jsonl")
    assert [row["step"] for row in found] == [4, 8, 10]
    assert [row["loss"] for row in found] == pytest.approx([0.25, 0.125, 0.1])


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", every=1)
    file.on_numbers(1, {"loss": math.nan, "up": math.inf, "each": np.array([-np.inf, 1.5])})
    file.close()
    refuse = lambda name: pytest.fail(f"{name} is no JSON")
    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": "NaN", "up": "Infinity", "each": ["-Infinity", 1.5]}
    (row,) = metrics.read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(row["loss"])
    assert (row["up"], row["each"]) == (math.inf, [-math.inf, 1.5])


def test_floats_keep_all_their_bits(tmp_path):
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32).tolist()
    file = MetricsFile(tmp_path / "m.jsonl", every=1)
    for step, value in enumerate(values, 1):
        file.on_numbers(step, {"loss": value})
    file.close()
    assert [row["loss"] for row in metrics.read_metrics(tmp_path / "m.jsonl")] == values


def test_a_file_cut_at_any_byte_is_completed_by_the_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of files
    whole = written(tmp_path / "whole.jsonl", stop=4)
    kept = whole.index(b'{"step": 3')  # the rows up to the checkpoint of step 2
    for cut in range(kept, len(whole) + 1):
        (tmp_path / "cut.jsonl").write_bytes(whole[:cut])
        assert written(tmp_path / "cut.jsonl", resumed_at=2, stop=4) == whole
    assert len(whole) - kept > 100
    assert {path.name for path in tmp_path.iterdir()} == {"whole.jsonl", "cut.jsonl"}


def test_rows_can_be_forced_to_the_disk_before_a_checkpoint(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    file = MetricsFile(tmp_path / "m.jsonl", every=1)
    file.on_numbers(1, {"loss": 1.0})
    file.sync()
    file.close()
    assert synced == [len('{"step": 1, "loss": 1.0}\n')]


def test_a_restarted_run_has_only_its_own_rows(tmp_path):
    whole = written(tmp_path / "m.jsonl")
    assert written(tmp_path / "m.jsonl") == whole


def test_zeros_that_a_power_cut_left_at_the_end_are_removed(tmp_path):
    path = tmp_path / "m.jsonl"
    whole = written(path)
    path.write_bytes(whole[:-10] + bytes(4096))
    assert written(path, resumed_at=4) == whole


def test_a_kill_during_the_repair_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    whole = written(path)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            MetricsFile(path, every=1, resumed_at=2)
    assert path.read_bytes() == whole
    assert written(path, resumed_at=2) == whole


def test_a_damaged_row_in_the_middle_is_named_with_its_fix(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{oops}\n", *lines[3:]]))
    with pytest.raises(CheckpointError, match=r"row 3 of .*oops.*sed -i 3d") as error:
        metrics.read_metrics(path)
    subprocess.run(str(error.value).rpartition("remove it: ")[2], shell=True, check=True)
    assert len(metrics.read_metrics(path)) == len(lines) - 1


def test_a_metric_called_step_is_refused(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", every=1)
    with pytest.raises(LossError, match=r'called "step".*another name'):
        file.on_numbers(1, {"step": 3.0})
    file.close()


# A run of 60 steps with a checkpoint every 5, in a process for each life. The parent imports once
# and forks, kills the child after so many microseconds, and lets the last one end. The first lives
# take their time, so that a parent that gets no processor does not come too late to kill them.
_KILLED = """
import itertools, os, random, signal, sys, time, warnings
from pathlib import Path
import numpy as np
from jtrain.train.hooks import EvaluateEvery, SaveEvery
from jtrain.train.hooks.metrics import MetricsFile
from jtrain.io.atomic_write import atomic_write
from jtrain.core.loop import train_loop
from jtrain.core.mean import Mean

def step(state, batch):
    time.sleep(5e-4 if kills >= 4 else 5e-3)
    state = state * 1.25 % 1 + 1e-3
    return state, {"loss": Mean(np.float32(state), np.float32(1))}

def run(folder):
    checkpoint = folder / "checkpoint"
    start, state = checkpoint.read_text().split() if checkpoint.exists() else ("0", "0.5")
    start, state = int(start), float(state)
    metrics = MetricsFile(folder / "metrics.jsonl", every=1, resumed_at=start or None)
    save = lambda step, state: atomic_write(checkpoint, f"{step} {state!r}".encode())
    measure = lambda state: {"loss": state / 3}
    log = lambda step, numbers: metrics.row(step, "valid", numbers)
    evaluate = EvaluateEvery(every=5, measure=measure, log=log)
    hooks = [metrics, evaluate, SaveEvery(every=5, save=save)]
    train_loop(step, state, itertools.repeat({}), start=start, stop=60, hooks=hooks)

warnings.simplefilter("ignore")  # jax about fork; no thread of it runs yet
lives, seed = Path(sys.argv[1]), int(sys.argv[2])
wait, kills = random.Random(seed), 0
while True:
    child = os.fork()
    if child == 0:
        run(lives)
        os._exit(0)
    if kills < 25:
        time.sleep(wait.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    kills += os.WIFSIGNALED(status)
    if os.WIFEXITED(status):
        assert status == 0, status
        break
once = lives / "once"
once.mkdir()
run(once)
print(kills)
"""


@pytest.mark.thorough
def test_a_run_killed_again_and_again_writes_the_file_of_one_never_killed(tmp_path):
    seed = random.randrange(1000)
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(seed)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4, f"seed {seed}: the run was killed only {done.stdout} times"
    found = (tmp_path / "metrics.jsonl").read_bytes()
    assert found == (tmp_path / "once" / "metrics.jsonl").read_bytes(), f"seed {seed}"
    assert len(found.splitlines()) == 60 + 12
