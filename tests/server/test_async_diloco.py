"""Mode async_diloco: each unit once, delayed Nesterov momentum, and nobody waits."""

import jax
import numpy as np
import optax
import pytest
from comparison import assert_leaves_close, distance
from quick_study import write_study
from server_runs import Losses, host, server_setup, train_on_one_device, train_on_servers

from jtrain.core.loop import Stop
from jtrain.parallel.strategies.delayed_nesterov import delayed_nesterov

SGD = "optimizer={kind: sgd, lr: 0.3}"
CADENCE = ("evaluate.every=0", "checkpoint.every=0")
DRAW = np.random.default_rng(0)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def grads():
    return {"a": DRAW.normal(size=(3, 2)).astype(np.float32), "b": np.float32(DRAW.normal())}


def walk(rule, all_grads):
    params = jax.tree.map(np.zeros_like, all_grads[0])
    state = rule.init(params)
    for each in all_grads:
        updates, state = rule.update(each, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_delayed_nesterov_is_algorithm_3():
    """The paper's algorithm with c = 0, written out for nine gradients and a delay of 3."""
    lr, beta, delay = 0.7, 0.9, 3
    all_grads = [grads() for _ in range(9)]
    theta = jax.tree.map(np.zeros_like, all_grads[0])
    momentum = total = theta
    for t, g in enumerate(all_grads):
        total = jax.tree.map(np.add, total, g)
        if (t + 1) % delay == 0:
            momentum = jax.tree.map(lambda m, d: beta * m + d / delay, momentum, total)
            step = jax.tree.map(lambda m, x: beta * m + x / delay, momentum, g)
            total = jax.tree.map(np.zeros_like, total)
        else:
            step = jax.tree.map(lambda x: x / delay, g)
        theta = jax.tree.map(lambda p, s: p - lr * s, theta, step)
    assert_leaves_close(walk(delayed_nesterov(lr, beta, delay), all_grads), theta, 1e-6)


def test_a_delay_of_one_is_nesterov_momentum():
    all_grads = [grads() for _ in range(6)]
    want = walk(optax.sgd(0.5, momentum=0.8, nesterov=True), all_grads)
    assert_leaves_close(walk(delayed_nesterov(0.5, 0.8, 1), all_grads), want, 1e-6)


@pytest.mark.thorough
def test_one_worker_with_one_inner_step_of_sgd_is_data_parallel(study):
    one = train_on_one_device(study, SGD, "steps=5")
    mode = "{kind: async_diloco, inner_steps: 1, lr: 1.0, momentum: 0.0}"
    setup = server_setup(study, mode, SGD, "steps=5", *CADENCE, workers=1, shards=2)
    assert distance(train_on_servers(setup).state.params, one.state.params) <= 1e-6


def test_one_worker_is_diloco(study):
    """Nothing is stale: 8 steps in rounds of 3, with the optimizer's state carried over."""
    rule, values = "optimizer={kind: adamw, lr: 1e-2}", "inner_steps: 3, lr: 0.7, momentum: 0.9"
    runs = []
    for kind in ("diloco", "async_diloco"):
        mode = f"{{kind: {kind}, {values}}}"
        setup = server_setup(study, mode, rule, "steps=8", *CADENCE, workers=1, shards=1)
        runs.append(train_on_servers(setup).state)
    want, got = runs
    assert distance(got.params, want.params) <= 1e-6
    assert distance(got.opt_state.inner, want.opt_state.inner) <= 1e-6


@pytest.mark.thorough
def test_each_step_is_reported_once_and_gates_have_all_of_it(study):
    """Three workers, one of them slow, with a checkpoint in between that changes nothing."""
    seen = []

    class Gate(Losses):
        every = 8

        def on_state(self, step, state, metrics):
            seen.append((step, int(state.step), host(state.params)))

    hooks = [Losses(), Gate()]
    mode = "{kind: async_diloco, inner_steps: 4}"
    setup = server_setup(study, mode, SGD, "steps=30", "batch=12", *CADENCE, workers=3, shards=2)
    slow = {"JTRAIN_SERVER_SLOW": "0,0,0.05"}
    got = train_on_servers(setup, hooks=hooks, environ=slow)
    assert [step for step, _ in hooks[0].numbers] == list(range(1, 31))
    assert [each[:2] for each in seen] == [(8, 8), (16, 16), (24, 24)]
    assert int(got.state.step) == 30
    one = train_on_one_device(study, SGD, "steps=30", "batch=12", "evaluate.every=0")
    assert setup.measure(got.state)["loss"] < 1.2 * setup.measure(one.state)["loss"]


class StopAt(Losses):
    def on_numbers(self, step, numbers):
        super().on_numbers(step, numbers)
        return Stop("asked") if step == 4 else None


@pytest.mark.thorough
def test_a_stop_waits_for_what_is_leased_and_leases_no_more(study):
    """A slow worker is behind the others when the run is asked to stop."""
    mode = "{kind: async_diloco, inner_steps: 4}"
    setup = server_setup(study, mode, SGD, "steps=400", "batch=12", *CADENCE, workers=2)
    coordinators, closed_at = [], []

    def record(coordinator, supervisor):
        close = coordinator.close
        coordinator.close = lambda: closed_at.append(close()) or closed_at[-1]
        coordinators.append(coordinator)

    ended = train_on_servers(
        setup, hooks=[StopAt()], meddle=record, environ={"JTRAIN_SERVER_SLOW": "0,0.02"}
    )
    assert ended.step == closed_at[0] < 400
    assert coordinators[0].lost_updates == 0
