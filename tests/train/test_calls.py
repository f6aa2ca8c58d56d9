"""`steps_per_call: auto`: several steps a call of a small step, with the results of one by one."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from comparison import assert_close
from quick_study import config_of, kept, trained

import jtrain as jt
from chaos import numbers
from jtrain.core.loop import train_loop
from jtrain.data.batches.workers import Workers
from jtrain.train.call_schedule import (
    MAX_STEPS,
    MIN_PROGRAM_STEPS,
    CallEnds,
    CallSchedule,
    auto_schedule,
    find_call_ends,
)
from jtrain.train.hooks.function_hooks import on_numbers, on_state
from jtrain.train.program import set_up

CONFIG = "configs/quick.yaml"

# No cadence divides another one, and none the steps.
CADENCES = ("steps=23", "evaluate.every=6", "checkpoint.every=5")

ONE = "steps_per_call=1"


def tiles(schedule: CallSchedule, start: int = 0) -> list[tuple[int, int]]:
    """The first and the last step of each call."""
    found = []
    while start < schedule.stop:
        found.append((start + 1, schedule.after(start)))
        start = schedule.after(start)
    return found


@pytest.mark.parametrize("ends", [(), (6, 15)])
def test_calls_take_every_step_once_and_end_at_each_cadence(ends):
    schedule = CallSchedule(longest=10, stop=64, varies=True, ends=ends, points=(33,))
    calls = tiles(schedule)
    taken = [step for first, last in calls for step in range(first, last + 1)]
    assert taken == list(range(1, 65))
    assert all(last - first < 10 for first, last in calls)
    lasts = {last for _, last in calls}
    assert lasts >= {x for each in (10, *ends) for x in range(each, 64, each)} | {33, 64}
    without_points = dataclasses.replace(schedule, points=())
    for first, last in tiles(without_points):
        assert {without_points.first(step) for step in range(first, last + 1)} == {first - 1}


@pytest.mark.usefixtures("study_home")
@pytest.mark.parametrize(
    ("seconds", "batch_bytes", "most"),
    [(1e-6, 100, MAX_STEPS), (0.9e-3, 100, 22), (1e-6, 1 << 24, 1)],
)
def test_the_steps_of_a_call_follow_from_the_size_of_a_step(seconds, batch_bytes, most):
    config = config_of(CONFIG, ["steps=1000", "evaluate.every=0", "checkpoint.every=0"])
    schedule = auto_schedule(config, seconds, batch_bytes)
    assert (schedule.longest, schedule.varies) == (most, most > 1)


LAYOUTS = {
    "single": "parallel.kind=single",
    "shard_map": "parallel={kind: mirrored, devices: 4, impl: shard_map}",
    "fsdp": "parallel={kind: fsdp, devices: 4, min_size: 0}",
}


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_takes_the_steps_of_one_step_a_call(layout):
    """Compare the states: the compiler may fuse the body of a loop in another way."""
    settings = (*CADENCES, LAYOUTS[layout], "microbatches=2")
    one = kept(trained(CONFIG, *settings, ONE, "name=one"))
    auto = kept(trained(CONFIG, *settings, "steps_per_call=auto", "name=auto"))
    rows = [
        [json.loads(line) for line in found.pop("metrics.jsonl").splitlines()]
        for found in (one, auto)
    ]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    assert one.keys() == auto.keys()
    for name, leaf in one.items():
        if leaf == auto[name]:
            continue
        # 23 updates from sums over 16 rows in another order, each off by a few parts in 1e7.
        assert_close(*(np.frombuffer(x, np.float32) for x in (auto[name], leaf)), within=1e-5)


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_a_hook_changes_no_bit():
    """Train with batch norm and rounding, where a program for one step has other bits."""
    program, states = set_up(numbers.config("run")), []
    for hooks in ([], [on_state(lambda step, state: None)]):
        schedule = program.schedule.ending_for(find_call_ends(hooks, 120))
        place = lambda batch, first, schedule=schedule: program.place(batch, schedule)
        with program.batches(schedule).read_ahead(Workers(), 0, place) as feed:
            how = {"start": 0, "stop": 12, "hooks": hooks}
            how["steps_per_call"] = schedule.steps_per_call
            step, state = program.compile_step(schedule), program.initial_state()
            states.append(train_loop(step, state, feed, **how).state)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_a_run_that_was_cut_within_a_call_resumes_to_the_same_bits(unbroken):
    """End a run at step 7, which no cadence names: a call of the whole run would pass it."""
    stop = on_state(lambda step, state: jt.Stop("cut") if step == 7 else None, every=7)
    first = trained(CONFIG, *CADENCES, hooks=[stop])
    assert (first.step, first.status) == (7, "stopped")
    assert kept(trained(CONFIG, *CADENCES)) == unbroken(*CADENCES)


def ends_for(*hooks: jt.Hook) -> CallEnds:
    return find_call_ends(hooks, 120)


def test_calls_are_as_long_as_the_cadence_of_a_hook():
    """Or each call would read batches that its padding hides."""
    schedule = CallSchedule(longest=50, stop=120, varies=True, ends=(60,))
    ending = schedule.ending_for(ends_for(on_state(lambda step, state: None, every=7)))
    assert ending.longest == 7
    assert "auto is 7 here" in ending.why
    assert "on_state(function, every=50)" in ending.why
    lasts = {last for _, last in tiles(ending)}
    assert lasts >= {*range(7, 120, 7), 50, 100, 60, 120}
    one = schedule.ending_for(ends_for(on_state(lambda step, state: None)))
    assert (one.longest, one.steps(3)) == (MIN_PROGRAM_STEPS, 1), (
        "a program for one step has other bits"
    )
    assert schedule.ending_for(ends_for(on_numbers(lambda step, numbers: None))) == schedule
    fixed = CallSchedule(longest=5, stop=20)
    assert fixed.ending_for(ends_for(on_state(lambda step, state: None))) == fixed
