"""Bad steps: skipped, stopped or rolled back at, and steps whose second computation differs."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from comparison import assert_close
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from chaos.numbers import config
from jtrain.config.sections import RollbackPolicy, SkipPolicy, Spike, StopPolicy
from jtrain.config.top import LogConfig
from jtrain.core.loop import FinishedSteps, Rollback
from jtrain.core.mean import Mean
from jtrain.errors import DeviceError
from jtrain.train.hooks.bad_step_log import BadStep, BadStepLog, RollbackDecision, read_decisions
from jtrain.train.hooks.bad_steps import BadSteps
from jtrain.train.hooks.guards import RunningMean
from jtrain.train.hooks.recompute_check import RecomputeCheck

CONFIG = config("steps")
OPEN: list[BadStepLog] = []


@pytest.fixture(autouse=True)
def _closed():
    yield
    while OPEN:
        OPEN.pop().close()


class Rows:
    """Batches, of which the first row of some steps is not finite."""

    def __init__(self, bad=()):
        self._bad = bad

    def __getitem__(self, i):
        x = np.float32([math.nan if i + 1 in self._bad else 1.0, 2.0])
        return {"x": x, "row": np.arange(2), "mask": np.ones(2, bool)}

    def number(self, i):
        return i

    def indices(self, number):
        del number
        return np.array([7, 8])


def log_in(path: Path, rows=None, **options) -> BadStepLog:
    rows = rows or Rows()
    return BadStepLog(path, rows, rows, **options)


def judged(tmp_path, guard, *, every=10, steps=100, **options) -> BadSteps:
    config = dataclasses.replace(CONFIG, guard=guard, steps=steps, log=LogConfig(every=1000))
    OPEN.append(log_in(tmp_path / "events.jsonl", options.pop("rows", None)))
    return BadSteps(config, OPEN[-1], every=every, **options)


def walk(bad_steps, start, stop, *, at=(), each=1, skipped=0, extra=False, scale=None, **fault):
    """Return the first stop of steps `start` .. `stop`, which are given `each` at a time.

    Steps in `at` have the numbers of `fault`, by default NaN.
    """
    fault = fault or {"loss": math.nan, "grad_norm": math.nan}
    for first in range(start, stop + 1, each):
        steps, rows = range(first, min(first + each, stop + 1)), []
        for step in steps:
            row = {"loss": 1.0, "grad_norm": 1.0, "update_norm": 1.0}
            row |= fault if step in at else {}
            bad = not math.isfinite(row["loss"] + row["grad_norm"])
            skipped += bad or (extra and step in at)
            rows.append({**row, "skipped": skipped, **({"loss_scale": scale} if scale else {})})
        ones = np.ones(len(steps))
        metrics = {name: Mean(np.array([row[name] for row in rows]), ones) for name in rows[0]}
        if asked := bad_steps.on_steps(FinishedSteps(steps, metrics, [])):
            return steps[-1], asked
    return None


def test_as_many_in_a_row_as_the_window_has_stop_the_run_and_say_what_to_try(tmp_path):
    bad_steps = judged(tmp_path, SkipPolicy(window=20))
    assert walk(bad_steps, 1, 100, at=range(7, 26)) is None, "one less is not an end"
    found = walk(bad_steps, 101, 200, at=range(105, 300), skipped=19)
    assert found is not None
    step, stop = found
    assert step == 130, "the first multiple after step 124"
    assert stop.kind == "failed"
    for part in (
        "no step from 105 to 124 was finite: loss nan, gradient norm nan.",
        "optimizer.clip=1.0",
        "--find-nan",
    ):
        assert part in stop.why


@pytest.mark.parametrize("each", [1, 3, 7])
@pytest.mark.parametrize("broken", [9, 13])
def test_a_run_ends_where_it_does_however_it_is_cut_and_logged(tmp_path, broken, each):
    guard = SkipPolicy(window=25)
    never = walk(judged(tmp_path, guard), 1, 60, at=range(4, 60))
    first = judged(tmp_path, guard)
    assert walk(first, 1, broken, at=range(4, 60), each=each) is None
    first.judge_all()
    skipped = max(0, broken - 3)
    again = judged(tmp_path, guard, start=broken, skipped=skipped, known=first.state())
    found = walk(again, broken + 1, 60, at=range(4, 60), skipped=skipped, each=each)
    assert found is not None
    assert never is not None
    assert found[1] == never[1]
    assert (never[0], found[0] // each * each <= 30 + each) == (30, True)


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (SkipPolicy(), "step 13 overflowed float16 at the smallest loss scale, precision.mini"),
        (StopPolicy(), "step 13 is not finite: loss 1, gradient norm inf"),
    ],
)
def test_an_overflow_at_the_least_loss_scale_is_bad_and_above_it_none(tmp_path, guard, words):
    overflow = {"loss": 1.0, "grad_norm": math.inf}
    bad_steps = judged(tmp_path, guard, minimum=1.0)
    assert walk(bad_steps, 1, 12, at=(9,), scale=2.0, **overflow) is None
    found = walk(bad_steps, 13, 30, at=(13,), scale=1.0, skipped=1, **overflow)
    assert found is not None
    assert found[0] == 20
    assert found[1].why.startswith(words)


def test_data_that_is_not_finite_is_named_and_ends_a_run_that_it_costs_a_tenth_of_its_steps(
    tmp_path, caplog
):
    nan = range(3, 60, 4)
    bad_steps = judged(tmp_path, SkipPolicy(), rows=Rows(nan))
    found = walk(bad_steps, 1, 60, at=nan)
    assert found is not None
    assert found[0] == 20
    assert found[1].why.startswith("5 of 20 steps were skipped because the data is not finite: ")
    assert "step 3 was skipped: row 7 of `x` has nan" in caplog.text
    assert "fill them: x = np.nan_to_num(x)" in caplog.text
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 7, 11, 15, 19]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"loss": math.nan, "grad_norm": 1.0}, "is not finite: loss nan, gradient norm 1."),
        ({"loss": 1.0, "extra": True}, "makes extra non-finite: loss 1."),
        ({"loss": 3.1, "grad_norm": 1.0}, "is a spike: loss 3.1, and the mean before it 1."),
    ],
)
def test_a_bad_step_is_named_once(tmp_path, numbers, words):
    spike = Spike(loss=3.0, grad_norm=10.0, memory=5)
    guard = RollbackPolicy(spike=spike, back=1, skip=4)
    bad_steps = judged(tmp_path, guard, every=1)
    found = walk(bad_steps, 1, 8, at=(7,), **numbers)
    assert found is not None
    asked = found[1]
    assert isinstance(asked, Rollback)
    assert (found[0], asked.step, asked.back, asked.skip) == (7, 7, 1, 4)
    assert asked.why == f"step 7 {words}"
    assert bad_steps.bad
    assert bad_steps.bad.step == 7
    assert bad_steps.state()["steps"] == 6
    assert walk(bad_steps, 8, 9, at=(8,), skipped=1)[1] is asked, "what comes after is nothing"


def test_the_means_are_those_of_the_closed_form_and_resume_to_the_bit():
    memory, losses = 5, np.random.default_rng(0).normal(2.0, 1.0, 40)
    means = RunningMean(memory)
    for number, loss in enumerate(losses):
        if number == 17:
            kept = json.loads(json.dumps(means.state()))
            means = RunningMean(memory, **kept)
        means.absorb(loss, 2 * loss)
        means.absorb(math.nan, 1.0)
        means.absorb(1.0, math.inf)
    wanted = losses[:5].mean()
    for loss in losses[5:]:
        wanted = 0.8 * wanted + 0.2 * loss
    assert means.steps == 40
    assert_close([means.loss, means.grad_norm], [wanted, 2 * wanted], 1e-7)
    whole = RunningMean(memory)
    for loss in losses:
        whole.absorb(loss, 2 * loss)
    assert whole.state() == means.state()


BAD = [BadStep(step, "is not finite", math.nan, 1.0) for step in range(10)]


def test_decisions_outlive_what_came_after_the_checkpoint(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    events = log_in(path)
    assert not path.exists()
    events.append(BAD[2], "skipped")
    events.append(BAD[7], "rolled back", without=[5, 8])
    events.append(BAD[8], "stopped")
    events.close()
    path.write_bytes(path.read_bytes() + b'{"step": 9, "do')  # a kill
    assert read_decisions(path) == [RollbackDecision(7, (5, 8))]
    log_in(path, resumed_at=4).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 7]
    log_in(path, resumed_at=None).close()
    assert [json.loads(line)["done"] for line in path.read_text().splitlines()] == ["rolled back"]
    assert json.loads(path.read_text())["loss"] == "NaN"


COPIED = NamedSharding(Mesh(np.array(jax.devices()), "data"), P())


@jax.jit
def doubled(state, batch):
    return jax.tree.map(lambda x: x * 2 + batch, state), {}


def flipped(wrong: int):
    """Return the step; its `wrong`-th call flips a bit of device 5's replica."""
    calls = 0

    def step(state, batch):
        nonlocal calls
        calls += 1
        state, metrics = doubled(state, batch)
        if calls == wrong:
            parts = [np.array(shard.data) for shard in state["w"].addressable_shards]
            parts[5].view(np.uint32)[3] ^= 1
            devices = [shard.device for shard in state["w"].addressable_shards]
            arrays = [jax.device_put(*pair) for pair in zip(parts, devices, strict=True)]
            w = jax.make_array_from_single_device_arrays((8,), COPIED, arrays)
            state = {**state, "w": w}
        return state, metrics

    return step


def computed_twice(step, *, every: int, steps: int) -> RecomputeCheck:
    twice = RecomputeCheck(every=every)
    taken = twice.wrap(step)
    state = jax.device_put({"w": np.arange(8, dtype=np.float32), "b": np.float32(1)}, COPIED)
    for number in range(1, steps + 1):
        state, _ = taken(state, jax.device_put(np.float32(number), COPIED))
    twice.compare_all()
    return twice


@pytest.mark.parametrize("wrong", [3, 4], ids=["the one that is gone on with", "the other"])
def test_one_bit_of_one_device(wrong):
    with pytest.raises(DeviceError, match=r"step 3 was computed twice .* in w, on cpu:5 of"):
        computed_twice(flipped(wrong), every=3, steps=6)


def test_a_step_between_is_not_looked_at():
    computed_twice(flipped(2), every=3, steps=6)
