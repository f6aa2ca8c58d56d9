"""Bad steps: skipped, stopped or rolled back at, and steps whose second computation differs."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from comparison import assert_close
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.config.sections import RollbackPolicy, Spike
from jtrain.core.loop import Rollback, Stop
from jtrain.errors import DeviceError
from jtrain.train.hooks.bad_steps import (
    BadStep,
    BadStepGuard,
    BadStepLog,
    RollbackDecision,
    RunningMean,
    read_decisions,
)
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.skipped_steps import RecentSteps, SkippedSteps, StepMetrics


class Steps(RecentSteps):
    """Steps as they were taken, without arrays, and a count of those skipped so far."""

    def __init__(self, skipped: int = 0):
        super().__init__()
        self.taken: list[StepMetrics] = []
        self._skipped = skipped

    def take(self, step, *, loss=1.0, norm=1.0, scale=math.nan, extra=False) -> dict[str, float]:
        """Return the numbers of a step as a hook gets them."""
        self._skipped += extra or not math.isfinite(loss + norm)
        self.taken.append(StepMetrics(step, loss, norm, self._skipped, scale))
        return {"skipped": float(self._skipped), "loss": loss, "grad_norm": norm}

    def read(self, step):
        return [told for told in self.taken if told.step <= step]

    def forget(self, step):
        self.taken = [told for told in self.taken if told.step > step]


def walk(finite, steps, start, stop, **fault):
    """Return the first stop of steps `start` .. `stop`, with the bad steps `fault["at"]`."""
    at, bad = fault.pop("at", ()), {"loss": math.nan, "norm": math.nan} | fault
    for step in range(start, stop + 1):
        numbers = steps.take(step, **(bad if step in at else {}))
        asked = finite.on_numbers(step, numbers) if step % finite.every == 0 else None
        if asked:
            return step, asked
    return None


def made(**options):
    steps, said = Steps(options.get("skipped", 0)), []
    return SkippedSteps(recent=steps, log=said.append, **options), steps, said


def test_as_many_in_a_row_as_the_window_has_stop_the_run_and_say_what_to_try():
    finite, steps, said = made(window=20, log_every=1000)
    assert walk(finite, steps, 1, 100, at=range(7, 26)) is None, "one less is no end"
    step, stop = walk(finite, steps, 101, 200, at=range(105, 300)) or pytest.fail("it goes on")
    assert step == 130, "the first look after step 124"
    assert isinstance(stop, Stop)
    assert stop.kind == "failed"
    for part in (
        "no step from 105 to 124 was finite: loss nan, gradient norm nan.",
        "optimizer.clip=1.0",
        "--find-nan",
    ):
        assert part in stop.why
    assert said == []


@pytest.mark.parametrize("broken", [9, 13])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(broken):
    finite, steps, _ = made(window=25)
    never = walk(finite, steps, 1, 60, at=range(4, 60))
    finite, steps, _ = made(window=25)
    assert walk(finite, steps, 1, broken, at=range(4, 60)) is None
    finite.catch_up(broken)
    skipped = max(0, broken - 3)
    finite, steps, _ = made(window=25, start=broken, skipped=skipped, known=finite.state())
    again = walk(finite, steps, broken + 1, 60, at=range(4, 60))
    assert again is not None
    assert again == never
    assert again[0] == 30


def test_an_overflow_at_the_least_loss_scale_stops_the_run_and_says_what_to_set():
    finite, steps, said = made(minimum=1.0)
    overflow = {"loss": 1.0, "norm": math.inf}
    assert walk(finite, steps, 1, 10, at=(9,), scale=2.0, **overflow) is None
    step, stop = walk(finite, steps, 11, 30, at=(13,), scale=1.0, **overflow) or pytest.fail(
        "it goes on"
    )
    assert (step, stop.kind) == (20, "failed")
    for part in (
        "step 13 overflowed float16 at the smallest loss scale, precision.minimum=1.",
        "precision.kind=bf16",
    ):
        assert part in stop.why
    assert said == []


def told(guard: BadStepGuard, step: int, loss=1.0, norm=1.0, update=1.0, **more):
    return guard.on_numbers(step, {"loss": loss, "grad_norm": norm, "update_norm": update, **more})


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"loss": math.nan}, "is not finite: loss nan, gradient norm 1, update norm 1."),
        ({"skipped": 1.0}, "makes extra non-finite: loss 1."),
        ({"loss": 3.1}, "is a spike: loss 3.1, and the mean before it 1."),
    ],
)
def test_a_bad_step_is_named_once(numbers, words):
    guard = BadStepGuard(
        RollbackPolicy(spike=Spike(loss=3.0, grad_norm=10.0, memory=5), back=1, skip=4)
    )
    assert [told(guard, step) for step in range(1, 7)] == [None] * 6
    asked = told(guard, 7, **numbers)
    assert isinstance(asked, Rollback)
    assert (asked.step, asked.back, asked.skip) == (7, 1, 4)
    assert asked.why.startswith("step 7 ")
    assert words in asked.why
    assert told(guard, 8, loss=math.nan) is None, "what comes after it is of no account"
    assert guard.bad
    assert guard.bad.step == 7
    assert guard.means.steps == 6


def test_an_overflow_that_no_scale_helps_is_bad_and_a_loss_that_is_not_finite_at_once():
    asked = []

    def helps(step, state):
        asked.append((step, state))
        return step < 3

    guard = BadStepGuard(RollbackPolicy(), minimum=1.0, helps=helps)
    guard.on_state(2, "the newest", {})
    assert told(guard, 2, norm=math.nan, loss_scale=8.0) is None
    found = told(guard, 3, norm=math.inf, update=0.0, loss_scale=4.0)
    assert found
    assert "gradient norm inf, at the smallest loss scale too." in found.why
    assert asked == [(2, "the newest"), (3, "the newest")]
    for numbers in ({"loss": math.nan}, {"skipped": 1.0}):
        never = BadStepGuard(
            RollbackPolicy(), minimum=1.0, helps=lambda step, state: pytest.fail("not asked")
        )
        assert told(never, 1, loss_scale=8.0, **numbers)


def test_the_means_are_those_of_the_closed_form_and_resume_to_the_bit():
    memory, losses = 5, np.random.default_rng(0).normal(2.0, 1.0, 40)
    means = RunningMean(memory)
    for number, loss in enumerate(losses):
        if number == 17:
            kept = json.loads(json.dumps(means.state()))
            means = RunningMean(memory)
            means.restore(kept)
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
    events = BadStepLog(path)
    assert not path.exists()
    events.append(BAD[2], "skipped", batch=1)
    events.append(BAD[7], "rolled back", batch=6, without=[5, 8])
    events.append(BAD[8], "stopped", batch=7)
    events.close()
    path.write_bytes(path.read_bytes() + b'{"step": 9, "do')  # a kill
    assert read_decisions(path) == [RollbackDecision(7, (5, 8))]
    BadStepLog(path, resumed_at=4).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 7]
    BadStepLog(path, resumed_at=None).close()
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
        state, metrics = taken(state, jax.device_put(np.float32(number), COPIED))
        twice.on_state(number, state, metrics)
    twice.settle()
    return twice


@pytest.mark.parametrize("wrong", [3, 4], ids=["the one that is gone on with", "the other"])
def test_one_bit_of_one_device(wrong):
    with pytest.raises(DeviceError, match=r"step 3 was computed twice .* in w, on cpu:5 of"):
        computed_twice(flipped(wrong), every=3, steps=6)


def test_a_step_between_is_not_looked_at():
    computed_twice(flipped(2), every=3, steps=6)
