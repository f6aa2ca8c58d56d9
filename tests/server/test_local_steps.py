"""Modes local_sgd and diloco: equal to data parallel where they should be, and to their formula."""

import dataclasses

import jax
import numpy as np
import pytest
from comparison import distance
from quick_study import CODE, write_study
from server_runs import Losses, host, server_setup, train_on_one_device, train_on_servers

SGD = "optimizer={kind: sgd, lr: 0.3}"
MOMENTUM = "optimizer={kind: sgd, lr: 0.1, momentum: 0.9}"
pytestmark = pytest.mark.thorough
CADENCE = ("evaluate.every=0", "checkpoint.every=0")


@pytest.mark.parametrize(
    "mode",
    ["{kind: local_sgd, inner_steps: 1}", "{kind: diloco, inner_steps: 1, lr: 1.0, momentum: 0.0}"],
)
def test_one_inner_step_of_sgd_is_data_parallel(study, mode):
    one = train_on_one_device(study, SGD, "steps=5")
    program = server_setup(study, mode, SGD, "steps=5", *CADENCE, workers=4, shards=2)
    served = train_on_servers(program)
    assert distance(served.state.params, one.state.params) <= 1e-6


def test_masked_rows_count_nothing(tmp_path):
    """The 13th batch has 8 rows of 16, so that two of the four workers have none."""
    code = CODE.replace("seed=self.seed)", 'seed=self.seed, end="pad")')
    study, got, want = write_study(tmp_path, code), Losses(), Losses()
    values = SGD, "steps=14", *CADENCE
    one = train_on_one_device(study, *values, hooks=[want])
    mode = "{kind: local_sgd, inner_steps: 1}"
    program = server_setup(study, mode, *values, workers=4, shards=2)
    served = train_on_servers(program, hooks=[got])
    assert distance(served.state.params, one.state.params) <= 1e-6
    assert int(served.state.skipped) == 0
    for (_, ours), (_, theirs) in zip(got.numbers, want.numbers, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_diloco_is_its_formula(study):
    """Two rounds of two steps of two workers, against the paper's algorithm 1 written out here."""
    mode = "{kind: diloco, inner_steps: 2, lr: 0.5, momentum: 0.8}"
    program = server_setup(study, mode, MOMENTUM, "steps=4", *CADENCE, workers=2, shards=3)
    served = train_on_servers(program)

    plain = server_setup(study, "{kind: sync}", MOMENTUM, "steps=4")  # for its step
    step = jax.jit(plain._step(plain.schedule)[0])
    params, velocity = host(plain.initial_state().params), None
    states = [plain.initial_state(), plain.initial_state()]
    shards = [plain.resolved.experiment.train.shard(worker, 2) for worker in range(2)]
    for first in (0, 2):
        for worker in range(2):
            for number in (first, first + 1):
                states[worker], _ = step(states[worker], shards[worker][number])
        ends = [host(state.params) for state in states]
        change = jax.tree.map(lambda p, a, b: p - (a + b) / 2, params, *ends)
        zeros = jax.tree.map(np.zeros_like, change)
        velocity = jax.tree.map(lambda v, c: 0.8 * v + c, velocity or zeros, change)
        params = jax.tree.map(lambda p, v, c: p - 0.5 * (0.8 * v + c), params, velocity, change)
        states = [jax.tree.map(lambda x: x, state) for state in states]
        states = [_with_params(state, params) for state in states]
    assert distance(served.state.params, params) <= 1e-6
    inner = [state.opt_state for state in states]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *host(inner))
    assert distance(served.state.opt_state.inner, stacked) <= 1e-6


def _with_params(state, params):
    return dataclasses.replace(state, params=params)
