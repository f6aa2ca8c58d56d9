"""Mode sync takes the steps of one device, and the loop answers its hooks as `train_loop` does."""

import types
from typing import Any

import jax.numpy as jnp
import pytest
from comparison import distance
from server_runs import Losses, server_setup, train_on_one_device, train_on_servers

from jtrain.core.loop import Hook, Stop
from jtrain.core.mean import Mean
from jtrain.server.server_loop import take_steps

SGD = "optimizer={kind: sgd, lr: 0.3, momentum: 0.9, clip: 0.5}"


@pytest.mark.parametrize(
    ("workers", "shards"), [(2, 3), pytest.param(4, 1, marks=pytest.mark.thorough)]
)
def test_takes_the_step_of_one_device(study, workers, shards):
    want, got = Losses(), Losses()
    one = train_on_one_device(study, SGD, "steps=2", hooks=[want])
    program = server_setup(study, "{kind: sync}", SGD, "steps=2", workers=workers, shards=shards)
    served = train_on_servers(program, hooks=[got])
    assert distance(served.state.params, one.state.params) <= 1e-6
    assert distance(served.state.opt_state, one.state.opt_state) <= 1e-6
    for (step, ours), (other, theirs) in zip(got.numbers, want.numbers, strict=True):
        assert step == other
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-6), name


class Steps:
    """Coordinator whose steps are done at once."""

    plan: Any = types.SimpleNamespace(snapshot_every=4)

    def __init__(self):
        self._done = 0

    def advance(self, limit: int) -> list:
        self._done += 1
        loss = Mean(jnp.float32(self._done), jnp.float32(1))
        return [(self._done, {"loss": loss})]

    def close(self) -> int:
        return self._done

    def fetch(self, step: int) -> Any:
        return {"step": step}


class StopsAt(Hook):
    def __init__(self, step: int, why: str, *, every: int = 1):
        self._step, self._why, self.every = step, why, every

    def on_numbers(self, step, numbers):
        return Stop(self._why, "failed") if step >= self._step else None


class StopsByState(Hook):
    every = 2

    def on_state(self, step, state):
        return Stop("by the state")


def taken(*hooks: Hook) -> tuple[int, str]:
    coordinator: Any = Steps()
    ended = take_steps(coordinator, {}, start=0, stop=6, hooks=hooks)
    assert ended.numbers == {"loss": ended.step}
    return ended.step, ended.stop.why if ended.stop else ""


def test_the_first_request_to_end_is_the_answer():
    assert taken(StopsAt(2, "first"), StopsAt(2, "second")) == (2, "first")
    assert taken(StopsAt(2, "first"), StopsByState()) == (2, "first")
    assert taken(StopsByState()) == (2, "by the state")


def test_a_hook_sees_the_last_step_and_can_fail_the_run():
    assert taken(StopsAt(6, "skipped", every=4)) == (6, "skipped")
