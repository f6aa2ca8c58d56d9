"""Modes that wait for all: the steps of one device or of the formula, also after a death."""

import dataclasses
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import bitwise, distance
from quick_study import CODE, write_study
from server_runs import KillAt, Losses, host, server_setup, train_on_one_device, train_on_servers

from jtrain.core.loop import Hook, Stop
from jtrain.core.mean import Mean
from jtrain.errors import PeerError
from jtrain.server.server_loop import take_steps

CLIPPED = "optimizer={kind: sgd, lr: 0.3, momentum: 0.9, clip: 0.5}"
SGD = "optimizer={kind: sgd, lr: 0.3}"
MOMENTUM = "optimizer={kind: sgd, lr: 0.1, momentum: 0.9}"
CADENCE = ("evaluate.every=0", "checkpoint.every=0")


@pytest.mark.parametrize(
    ("workers", "shards"), [(2, 3), pytest.param(4, 1, marks=pytest.mark.thorough)]
)
def test_takes_the_step_of_one_device(study, workers, shards):
    want, got = Losses(), Losses()
    one = train_on_one_device(study, CLIPPED, "steps=2", hooks=[want])
    program = server_setup(
        study, "{kind: sync}", CLIPPED, "steps=2", workers=workers, shards=shards
    )
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mode",
    ["{kind: local_sgd, inner_steps: 1}", "{kind: diloco, inner_steps: 1, lr: 1.0, momentum: 0.0}"],
)
def test_one_inner_step_of_sgd_is_data_parallel(study, mode):
    one = train_on_one_device(study, SGD, "steps=5")
    program = server_setup(study, mode, SGD, "steps=5", *CADENCE, workers=4, shards=2)
    served = train_on_servers(program)
    assert distance(served.state.params, one.state.params) <= 1e-6


@pytest.mark.thorough
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


@pytest.mark.thorough
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
        states = [dataclasses.replace(state, params=params) for state in states]
    assert distance(served.state.params, params) <= 1e-6
    inner = [state.opt_state for state in states]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *host(inner))
    assert distance(served.state.opt_state.inner, stacked) <= 1e-6


@pytest.mark.thorough
def test_a_lost_server_changes_nothing_in_sync(study):
    lines, kill = [], KillAt(7, "shard", 1)
    values = "steps=12", "parallel.snapshot_every=4", MOMENTUM, "evaluate.every=0"
    program = server_setup(study, "{kind: sync}", *values, workers=2, shards=2)
    got = train_on_servers(program, hooks=[kill], meddle=kill.meddle, log=lines.append)
    want = Losses()
    one = train_on_one_device(study, "steps=12", MOMENTUM, "evaluate.every=0", hooks=[want])
    assert distance(got.state.params, one.state.params) <= 1e-5
    assert [step for step, _ in kill.numbers] == list(range(1, 13)), "no step twice"
    assert "server 1 ended (SIGKILL), and is started again" in lines
    assert any("server 1 is restored from step 4" in line for line in lines)


@pytest.mark.thorough
def test_lost_updates_of_a_server_are_counted_under_async(study):
    lines, kill = [], KillAt(7, "shard", 0)
    values = "steps=30", "parallel.snapshot_every=5", MOMENTUM, "evaluate.every=0"
    program = server_setup(study, "{kind: async}", *values, workers=2, shards=2)
    got = train_on_servers(program, hooks=[kill], meddle=kill.meddle, log=lines.append)
    assert int(got.state.step) == 30
    assert [step for step, _ in kill.numbers] == list(range(1, 31))
    assert any("server 0 is restored from step 5: its updates since then" in line for line in lines)
    counted = [line for line in lines if "server 0 has lost" in line]
    assert len(counted) == 1
    assert 2 <= int(counted[0].split()[4]) <= 5, "those of steps 6 and 7, and what was in the air"


@pytest.mark.thorough
def test_a_process_that_dies_again_and_again_ends_the_run(study):
    program = server_setup(study, "{kind: sync}", "steps=3", MOMENTUM, workers=2, shards=1)

    def break_it(coordinator, supervisor):
        start = supervisor._engine.start

        def fail(role, index, environ):
            process = start(role, index, environ)
            if (role, index) == ("worker", 1):
                process.end, process.error = "exit code 70", "no such data\n"
            return process

        supervisor._engine.start = fail
        supervisor.processes["worker", 1].end = "exit code 70"

    with pytest.raises(PeerError, match=r"no such data\nworker 1 ended .*parallel.restarts=3"):
        # The other worker never ends a step alone, so that the run waits for this one.
        train_on_servers(program, meddle=break_it, environ={"JTRAIN_SERVER_SLOW": "0,1000"})


@pytest.mark.thorough
def test_backups_leave_out_the_slowest_and_divide_by_the_others(study):
    """With one of two workers slow, a step is that of the rows of the other."""
    mode = "{kind: sync, backups: 1}"
    program = server_setup(study, mode, "steps=3", MOMENTUM, "evaluate.every=0", workers=2)
    got = Losses()
    served = train_on_servers(program, hooks=[got], environ={"JTRAIN_SERVER_SLOW": "0,1000"})
    half = server_setup(study, "{kind: sync}", "steps=3", MOMENTUM, "evaluate.every=0", "batch=8")
    state, step = half.initial_state(), half._step(half.schedule)[0]
    rows = program.resolved.experiment.train.shard(0, 2)
    for number in range(3):
        state, metrics = step(state, rows[number])
        assert got.numbers[number][1]["loss"] == pytest.approx(metrics["loss"].value(), rel=1e-6)
    assert distance(served.state.params, state.params) <= 1e-6


@pytest.mark.thorough
def test_two_runs_are_equal_to_the_bit(study):
    before = threading.active_count()
    program = server_setup(
        study, "{kind: sync}", "steps=4", "batch=12", MOMENTUM, workers=3, shards=2
    )
    assert bitwise(host(train_on_servers(program).state), host(train_on_servers(program).state))
    assert threading.active_count() < before + 100
