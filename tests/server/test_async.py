"""Modes async, ssp and async_diloco: each batch once, one device's steps where nothing is stale.

The clock of workers, and state beside the parameters, where rows of workers count differently.
"""

import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_leaves_close, distance
from quick_study import CODE, write_study
from server_runs import Losses, host, server_setup, train_on_one_device, train_on_servers

from jtrain.core.loop import Stop
from jtrain.core.mean import Mean
from jtrain.core.precision.loss_scale import Unscaled
from jtrain.core.state import TrainState
from jtrain.parallel.strategies.outer_optimizer import delayed_nesterov
from jtrain.parallel.strategies.server_modes import Apply, Compensate, Drop, Scale
from jtrain.server.paced import Clock, treat
from jtrain.server.rounds import take_metrics
from jtrain.server.wire import Message

SGD = "optimizer={kind: sgd, lr: 0.1, clip: 0.5}"


@pytest.mark.thorough
def test_one_worker_takes_the_steps_of_one_device(study):
    want, got = Losses(), Losses()
    one = train_on_one_device(study, SGD, "steps=6", hooks=[want])
    program = server_setup(study, "{kind: async}", SGD, "steps=6", workers=1, shards=3)
    served = train_on_servers(program, hooks=[got])
    assert distance(served.state.params, one.state.params) <= 1e-6
    for (_, ours), (_, theirs) in zip(got.numbers, want.numbers, strict=True):
        assert ours.pop("staleness") == 0
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-6), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mode", ["{kind: ssp, bound: 1}", "{kind: async, staleness: {kind: compensate}}"]
)
def test_several_workers_take_each_step_once_and_learn(study, mode):
    got = Losses()
    program = server_setup(study, mode, SGD, "steps=60", "evaluate.every=0", workers=3, shards=2)
    served = train_on_servers(program, hooks=[got])
    assert [step for step, _ in got.numbers] == list(range(1, 61))
    assert int(served.state.step) == 60
    one = train_on_one_device(study, SGD, "steps=60", "evaluate.every=0")
    assert program.measure(served.state)["loss"] < 1.1 * program.measure(one.state)["loss"]
    if "ssp" in mode:
        found = max(numbers["staleness"] for _, numbers in got.numbers)
        assert found <= most_stale(bound=1, workers=3)


CARRIED = CODE
for plain, with_state in {
    "def loss(params, batch, rng)": "def loss(params, extra, batch, rng)",
    "return cross_entropy(": "mean, metrics = cross_entropy(",
    """batch["label"], batch["mask"])""": """batch["label"], batch["mask"])
            mask = batch["mask"][:, None]
            seen = jnp.where(mask, extra["mean"][None] / 2 + batch["x"] / 2, 0)
            new = jt.Mean(seen.sum(0), batch["mask"].sum(dtype=jnp.float32))
            return mean, metrics, {"mean": new}""",
    "return params, ()": 'return params, {"mean": jnp.zeros(2)}',
    "loss=loss": "loss=jt.stateful(loss)",
}.items():
    assert CARRIED.count(plain) == 1
    CARRIED = CARRIED.replace(plain, with_state)


@pytest.mark.thorough
def test_carried_state_is_that_of_the_gradient_reported_last(tmp_path):
    study = write_study(tmp_path, CARRIED)
    one = train_on_one_device(study, SGD, "steps=6")
    program = server_setup(study, "{kind: async}", SGD, "steps=6", workers=1, shards=2)
    assert distance(train_on_servers(program).state.extra, one.state.extra) <= 1e-6


CADENCE = ("evaluate.every=0", "checkpoint.every=0")


def draw_grads(count):
    draw = np.random.default_rng(0)
    return [
        {"a": draw.normal(size=(3, 2)).astype(np.float32), "b": np.float32(draw.normal())}
        for _ in range(count)
    ]


def walk(rule, all_grads):
    params = jax.tree.map(np.zeros_like, all_grads[0])
    state = rule.init(params)
    for each in all_grads:
        updates, state = rule.update(each, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.thorough
def test_delayed_nesterov_is_algorithm_3():
    """The paper's algorithm with c = 0, written out for nine gradients and a delay of 3."""
    lr, beta, delay = 0.7, 0.9, 3
    all_grads = draw_grads(9)
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


@pytest.mark.thorough
def test_one_worker_is_diloco(study):
    """Nothing is stale: 8 steps in rounds of 3, with the optimizer's state carried over."""
    rule, values = "optimizer={kind: adamw, lr: 1e-2}", "inner_steps: 3, lr: 0.7, momentum: 0.9"
    runs = []
    for kind in ("diloco", "async_diloco"):
        mode = f"{{kind: {kind}, {values}}}"
        program = server_setup(study, mode, rule, "steps=8", *CADENCE, workers=1, shards=1)
        runs.append(train_on_servers(program).state)
    want, got = runs
    assert distance(got.params, want.params) <= 1e-6
    assert distance(got.opt_state.inner, want.opt_state.inner) <= 1e-6


@pytest.mark.thorough
def test_each_step_is_reported_once_and_gates_have_all_of_it(study):
    """Three workers, one of them slow, with a checkpoint in between that changes nothing."""
    seen = []

    class Gate(Losses):
        every = 8

        def on_state(self, step, state):
            seen.append((step, int(state.step), host(state.params)))

    hooks = [Losses(), Gate()]
    mode = "{kind: async_diloco, inner_steps: 4}"
    program = server_setup(study, mode, SGD, "steps=30", "batch=12", *CADENCE, workers=3, shards=2)
    slow = {"JTRAIN_SERVER_SLOW": "0,0,0.05"}
    got = train_on_servers(program, hooks=hooks, environ=slow)
    assert [step for step, _ in hooks[0].numbers] == list(range(1, 31))
    assert [each[:2] for each in seen] == [(8, 8), (16, 16), (24, 24)]
    assert int(got.state.step) == 30
    one = train_on_one_device(study, SGD, "steps=30", "batch=12", "evaluate.every=0")
    assert program.measure(got.state)["loss"] < 1.2 * program.measure(one.state)["loss"]


class StopAt(Losses):
    def on_numbers(self, step, numbers):
        super().on_numbers(step, numbers)
        return Stop("asked") if step == 4 else None


@pytest.mark.thorough
def test_a_stop_waits_for_what_is_leased_and_leases_no_more(study):
    """A slow worker is behind the others when the run is asked to stop."""
    mode = "{kind: async_diloco, inner_steps: 4}"
    program = server_setup(study, mode, SGD, "steps=400", "batch=12", *CADENCE, workers=2)
    coordinators, closed_at = [], []

    def record(coordinator, supervisor):
        close = coordinator.close

        def close_and_record():
            closed_at.append(close())
            return closed_at[-1]

        coordinator.close = close_and_record
        coordinators.append(coordinator)

    ended = train_on_servers(
        program, hooks=[StopAt()], meddle=record, environ={"JTRAIN_SERVER_SLOW": "0,0.02"}
    )
    assert ended.step == closed_at[0] < 400
    assert coordinators[0].lost_updates == 0


def head(mean: float) -> TrainState:
    extra = {"mean": jnp.full(2, mean), "count": jnp.int32(4)}
    zero = jnp.int32(0)
    return TrainState(
        **{"step": zero, "skipped": zero, "scale": Unscaled(), "extra": extra},
        **{"params": (), "opt_state": (), "seed": jnp.uint32(0)},
    )


@pytest.mark.parametrize(("rows", "want"), [([3, 1], 3.0), ([0, 0], 5.0)])
def test_the_mean_over_workers_is_by_the_weights_of_their_rows(rows, want):
    metrics = [{"loss": Mean(jnp.ones(1), jnp.full(1, float(n)))} for n in rows]
    heads = [head(1.0), head(9.0)]
    plan: Any = SimpleNamespace(report=(metrics[0], heads[0]))
    reports = {
        worker: Message("report", {}, [np.asarray(x) for x in jax.tree.leaves(each)])
        for worker, each in enumerate(zip(metrics, heads, strict=True))
    }
    found, _ = take_metrics(plan, 1, 1, reports)
    np.testing.assert_array_equal(found.extra["mean"], np.full(2, want, np.float32))
    assert found.extra["count"] == 4


def most_stale(bound, workers):
    return (2 * bound + 1) * (workers - 1)


class Simulation:
    """Workers with random delays on a clock of the simulation, and some that die."""

    def __init__(self, clock, workers, steps, seed, deaths=0.0):
        self.clock, self.workers, self.steps = clock, workers, steps
        self.draw, self.deaths = random.Random(seed), deaths
        self.done: list[int] = []
        self.staleness: list[int] = []
        self.most_ahead = 0

    def run(self):
        clock, draw = self.clock, self.draw
        clock.limit = self.steps
        speed = [draw.choice([1.0, 1.0, 3.0, 10.0]) for _ in range(self.workers)]
        phase = dict.fromkeys(range(self.workers), "idle")
        due = {worker: 0.0 for worker in phase}
        applied: set[int] = set()
        seen: dict[int, int] = {}  # updates in what a worker has pulled
        now = 0.0
        while len(self.done) < self.steps:
            worker = min(due, key=lambda w: (due[w], w))
            now = max(now, due[worker])
            due[worker] = now + draw.expovariate(1.0 / speed[worker])
            if draw.random() < self.deaths and len(clock.clocks) > 1:
                clock.leave(worker)
                phase[worker] = "idle"
                continue
            lease = clock.lease(worker)
            if lease is None:
                due[worker] = now + 0.1
                continue
            if phase[worker] == "idle":
                seen[worker] = len(applied)
                phase[worker] = "computes"
            elif phase[worker] == "computes":
                stale = clock.admit(worker, lease.step)
                assert stale is not None
                assert clock.admit(worker, lease.step) == stale, "asked twice"
                self.staleness.append(stale)
                assert len(applied) - seen[worker] <= stale, "updates that it did not see"
                phase[worker] = "pushes"
                due[worker] = now + draw.expovariate(5.0)
            else:
                applied.add(lease.step)
                assert clock.report(worker, lease.step)
                assert not clock.report(worker, lease.step), "the second report counts nothing"
                self.done.append(lease.step)
                phase[worker] = "idle"
                ahead = max(clock.clocks.values()) - min(clock.clocks.values())
                self.most_ahead = max(self.most_ahead, ahead)
        return self


@pytest.mark.thorough
@pytest.mark.parametrize(("bound", "workers"), [(0, 4), (3, 6)])
def test_the_bound_holds_whatever_the_delays(bound, workers):
    found = Simulation(Clock(workers=workers, bound=bound), workers, 1_000, seed=bound).run()
    assert max(found.staleness) <= most_stale(bound, workers)
    assert found.most_ahead <= bound + 1
    assert sorted(found.done) == list(range(1, 1_001)), "each batch once"


@pytest.mark.parametrize("bound", [None, 2])
def test_each_step_is_taken_once_though_workers_die(bound):
    clock = Clock(workers=4, bound=bound)
    found = Simulation(clock, 4, 3_000, seed=1, deaths=0.02).run()
    assert sorted(found.done) == list(range(1, 3_001))
    assert not clock.leases


def test_treatments_are_those_of_the_papers():
    assert treat(Apply(), 9).factor == 1
    assert treat(Scale(), 3).factor == 0.25
    assert [treat(Drop(limit=2), t).factor for t in (2, 3)] == [1, 0]
    assert treat(Compensate(strength=0.5), 1) == (1, 0.5)
