"""The loop: each hook sees each of its steps once, in order, and nothing runs too far ahead."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import strategy
from line import points, squared, start

from jtrain.core.loop import Hook, Stop, train_loop
from jtrain.core.mean import Mean
from jtrain.core.step import make_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(Hook):
    """Writes down what it sees; asks to stop where it is told to."""

    seen: list = dataclasses.field(default_factory=list)
    every: int = 1
    stop_numbers: int = -1
    stop_state: int = -1

    def on_numbers(self, step, numbers):
        self.seen.append(("numbers", step, numbers["loss"]))
        return Stop("numbers say so") if step == self.stop_numbers else None

    def on_state(self, step, state):
        self.seen.append(("state", step, int(state)))
        return Stop("the state says so", "finished") if step == self.stop_state else None

    def of(self, kind: str) -> list:
        return [(step, value) for what, step, value in self.seen if what == kind]


def count(state, batch):
    """Adds up; its loss is the sum before."""
    return state + batch, {"loss": Mean(state.astype(jnp.float32), jnp.float32(1))}


STEP = jax.jit(count)


def run(*hooks, steps=6, **options):
    feed = itertools.repeat(jax.device_put(np.int32(1)))
    options = {"start": 0, "stop": steps, "in_flight": 2} | options
    return train_loop(STEP, jnp.int32(options["start"]), feed, hooks=hooks, **options)


@pytest.mark.parametrize(("every", "in_flight"), [(1, 2), (2, 2), (4, 0), (6, 2), (100, 100)])
def test_each_hook_sees_each_of_its_steps_once_and_in_order(every, in_flight):
    hook = Recorder(every=every)
    ended = run(hook, in_flight=in_flight)
    due = range(every, 7, every)
    assert hook.of("numbers") == [(step, step - 1) for step in sorted({*due, 6})]
    assert hook.of("state") == [(step, step) for step in due]
    assert (int(ended.state), ended.step, ended.stop) == (6, 6, None)
    assert ended.numbers == {"loss": 5}


def test_hooks_of_one_kind_see_a_step_in_the_order_given():
    seen = []

    class Named(Hook):
        def __init__(self, name):
            self.name = name

        def on_state(self, step, state):
            seen.append((step, self.name))

    run(Named("first"), Named("second"), steps=2)
    assert seen == [(1, "first"), (1, "second"), (2, "first"), (2, "second")]
    assert Hook.every == 1, "where a hook says nothing"


def test_a_call_of_several_steps_tells_each_of_them():
    step = jax.jit(lambda state, batches: jax.lax.scan(count, state, batches))
    hook, feed = Recorder(), itertools.repeat(jax.device_put(np.ones(3, np.int32)))
    ended = train_loop(
        step, jnp.int32(0), feed, start=0, stop=9, hooks=[hook], steps_per_call=3, in_flight=1
    )
    assert hook.of("numbers") == [(n, n - 1) for n in range(1, 10)]
    assert hook.of("state") == [(3, 3), (6, 6), (9, 9)]
    assert ended.step == 9


def test_stops_after_the_step_whose_state_asked_for_it():
    hook = Recorder(stop_state=3)
    ended = run(hook)
    assert (ended.step, int(ended.state)) == (3, 3)
    assert ended.stop == Stop("the state says so", "finished")
    assert [step for step, _ in hook.of("numbers")] == [1, 2, 3], "all numbers are told before"


def test_stops_soon_after_the_step_whose_numbers_asked_for_it():
    hook = Recorder(stop_numbers=3)
    ended = run(hook, steps=100)
    assert ended.stop == Stop("numbers say so")
    assert 3 <= ended.step <= 3 + 2, "those in flight are done"
    assert [step for step, _ in hook.of("numbers")] == list(range(1, ended.step + 1))
    assert int(ended.state) == ended.step


def test_numbers_can_stop_what_takes_the_state_of_the_same_step():
    """A checkpoint is written only of a state whose numbers were read."""
    asks, keeper = Recorder(stop_numbers=4), Recorder(every=4)
    ended = run(asks, keeper, steps=100, in_flight=100)
    assert (ended.step, ended.stop) == (4, Stop("numbers say so"))


class Steps:
    """A recorder of every step."""

    def __init__(self, stop=-1):
        self.seen, self._stop = [], stop

    def on_steps(self, finished):
        assert len(finished.metrics["loss"].total) == len(finished.steps)
        self.seen += zip(finished.steps, finished.metrics["loss"].value().tolist(), strict=True)
        return Stop("a step") if self._stop in finished.steps else None


@pytest.mark.parametrize("each", [1, 3])
def test_a_recorder_gets_every_step_once(each):
    step = jax.jit(lambda state, batches: jax.lax.scan(count, state, batches)) if each > 1 else STEP
    ones = np.ones(each, np.int32) if each > 1 else np.int32(1)
    recorder, hook, feed = Steps(), Recorder(every=each), itertools.repeat(jax.device_put(ones))
    options = {"start": 0, "stop": 33, "steps_per_call": each, "record_every": 4 * each}
    train_loop(step, jnp.int32(0), feed, hooks=[hook], recorders=[recorder], **options)
    assert recorder.seen == [(n, n - 1) for n in range(1, 34)]
    recorder = Steps(stop=9)
    ended = train_loop(
        step, jnp.int32(0), feed, recorders=[recorder], in_flight=1, **(options | {"stop": 99})
    )
    assert ended.stop == Stop("a step")
    assert ended.step == (12 + 1) * (each == 1) + (12 + 3) * (each == 3)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_no_more_calls_are_in_flight_than_asked(in_flight):
    """Started and not yet done, when another is started."""
    started, late = [], []

    def step(state, batch):
        late.append(sum(not x.is_ready() for x in jax.tree.leaves(started)))
        state, metrics = STEP(state, batch)
        started.append(metrics)
        assert all(x.is_ready() for x in jax.tree.leaves(started[: -in_flight - 1]))
        return state, metrics

    feed = itertools.repeat(jax.device_put(np.int32(1)))
    train_loop(step, jnp.int32(0), feed, start=0, stop=30, in_flight=in_flight)
    assert len(late) == 30


@pytest.mark.thorough
def test_many_collectives_unwatched_come_to_an_end():
    """JAX 0.10 and 0.11 stop for ever at more than 32 of them on several CPU devices."""
    where, optimizer = strategy("mirrored jit", 8), optax.sgd(1e-3)
    state, batch = start(optimizer, where), where.place(points(8))
    step = where.compile(make_step(squared, optimizer), state, batch, returns_state=True)
    ended = train_loop(step, state, itertools.repeat(batch), start=0, stop=500)
    assert int(ended.state.step) == 500


@pytest.mark.parametrize("kind", ["on_numbers", "on_state"])
def test_what_a_hook_raises_is_raised(kind):
    def broken(self, step, *_):
        if step == 2:
            raise OSError("the disk is full")

    hook = type("Broken", (Hook,), {kind: broken})()
    with pytest.raises(OSError, match="the disk is full"):
        run(hook)


def test_a_batch_that_was_not_placed_is_caught_and_a_placed_one_taken():
    optimizer, where = optax.sgd(0.1), strategy("mirrored jit", 2)
    state, batch = start(optimizer, where), points()
    step = make_step(squared, optimizer)
    step = where.compile(step, state, where.place(batch), returns_state=True)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train_loop(step, state, itertools.repeat(batch), start=0, stop=1)
    ended = train_loop(step, state, itertools.repeat(where.place(batch)), start=0, stop=1)
    assert int(ended.state.step) == 1


@pytest.mark.thorough
def test_one_cpu_device_takes_numpy_arrays_and_no_other_transfer():
    optimizer, where = optax.sgd(0.1), strategy("single", 1)
    state, batch = start(optimizer, where), where.place_for_call(points())
    assert {type(x) for x in batch.values()} == {np.ndarray}
    step = where.compile(make_step(squared, optimizer), state, batch, returns_state=True)
    ended = train_loop(step, state, itertools.repeat(batch), start=0, stop=1)
    assert int(ended.state.step) == 1
    host = jax.tree.map(np.asarray, ended.state)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train_loop(step, host, itertools.repeat(where.place(batch)), start=0, stop=1)


def test_a_step_at_which_a_run_is_interrupted_is_not_the_last():
    ends = {}
    for kind in ("interrupted", "finished", "failed"):
        hook = Recorder(every=5)

        class Stops(Hook):
            def on_state(self, step, state, kind=kind):
                return Stop("why", kind) if step == 3 else None

        ended = run(hook, Stops())
        assert ended.numbers == {"loss": 2}
        ends[kind] = [step for step, _ in hook.of("numbers")]
    assert ends == {"interrupted": [], "finished": [3], "failed": []}


def test_what_is_seen_at_the_last_step_may_end_a_run():
    hook = Recorder(every=5, stop_numbers=6)
    assert run(hook).stop == Stop("numbers say so")
    assert run(Recorder(), start=6).numbers == {}
