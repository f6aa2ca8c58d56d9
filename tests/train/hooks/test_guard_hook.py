import json
import math
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close

from jtrain.config.guard import RollbackPolicy, Spike, StopPolicy
from jtrain.core.loop import Rollback, Stop
from jtrain.train.hooks.bad_step_guard import BadStepGuard, RunningMean
from jtrain.train.hooks.bad_step_log import BadStep, BadStepLog, RollbackDecision, read_decisions


def told(guard: BadStepGuard, step: int, loss=1.0, norm=1.0, update=1.0, **more):
    return guard.on_numbers(step, {"loss": loss, "grad_norm": norm, "update_norm": update, **more})


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"loss": math.nan}, "is not finite: loss nan, gradient norm 1, update norm 1."),
        ({"norm": math.inf, "update": 0.0}, "is not finite: loss 1, gradient norm inf."),
        ({"update": math.nan}, "update norm nan"),
        ({"skipped": 1.0}, "makes extra non-finite: loss 1."),
        ({"loss": 3.1}, "is a spike: loss 3.1, and the mean before it 1."),
        ({"norm": 10.5}, "is a spike: gradient norm 10.5, and the mean before it 1."),
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


def test_a_run_that_is_to_stop_fails():
    asked = told(BadStepGuard(StopPolicy()), 1, loss=math.inf)
    assert type(asked) is Stop
    assert asked.kind == "failed"


def test_no_step_is_judged_before_the_means_are_known():
    guard = BadStepGuard(StopPolicy(spike=Spike(loss=2.0, memory=4)))
    assert [told(guard, n, loss=x) for n, x in enumerate((9.0, 1.0, 8.0, 2.0), 1)] == [None] * 4
    assert told(guard, 5, loss=11.0)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_it_rolls_back_only_so_often_within_so_many_steps(most):
    guard = BadStepGuard(
        RollbackPolicy(most=most, within=10), earlier=[1, 5]
    )  # the first is long ago
    asked = told(guard, 12, loss=math.nan)
    assert isinstance(asked, Rollback) == (most == 2)
    if most < 2:
        assert asked
        assert (
            f"was rolled back 1 times within 10 steps (for 5), and guard.most is {most}"
            in asked.why
        )


def test_an_overflow_is_bad_only_at_the_smallest_loss_scale():
    guard = BadStepGuard(RollbackPolicy(), minimum=1.0)
    assert told(guard, 1, norm=math.inf, loss_scale=2.0) is None
    assert guard.means.steps == 0, "a step that was not taken is not taken in"
    assert told(guard, 2, norm=math.inf, loss_scale=1.0)


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


def test_a_mean_below_zero_has_spikes_above_it():
    means = RunningMean(1, steps=1, loss=-5.0)
    assert not means.above("loss", -4.0, 2.0)
    assert means.above("loss", 0.5, 2.0)
    assert not means.above("loss", 100.0, 0.0)


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


def test_without_a_file_nothing_is_written(tmp_path: Path):
    BadStepLog(None).append(BAD[1], "skipped")
    assert read_decisions(tmp_path / "events.jsonl") == []
