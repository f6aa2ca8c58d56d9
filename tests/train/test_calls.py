"""`steps_per_call: auto`: several steps a call of a small step, with the results of one by one."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from comparison import assert_close
from quick_study import at_home, config_of, kept, trained, write_study

import jtrain as jt
from chaos import numbers
from jtrain.core.loop import train_loop
from jtrain.data.batches.workers import Workers
from jtrain.errors import ConfigError
from jtrain.train.calls.program import LIVE, mark_live
from jtrain.train.calls.schedule import (
    LEAST,
    MOST,
    CallSchedule,
    auto_schedule,
    find_hook_ends,
    fixed_schedule,
    loss_seconds,
)
from jtrain.train.hooks.function_hooks import on_numbers, on_state
from jtrain.train.setup import set_up
from jtrain.train.step_time import set_up_with_step_time
from jtrain.train.trackers.tensorboard import TensorBoard

CONFIG = "configs/quick.yaml"
# No cadence divides another one, and none the steps.
CADENCES = ("steps=23", "evaluate.every=6", "checkpoint.every=5")
ONE = "steps_per_call=1"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)


def tiles(schedule: CallSchedule, start: int = 0) -> list[tuple[int, int]]:
    """The first and the last step of each call."""
    found = []
    while start < schedule.stop:
        found.append((start + 1, schedule.after(start)))
        start = schedule.after(start)
    return found


@pytest.mark.parametrize("ends", [(), (7,), (6, 15), (1,)])
def test_calls_take_every_step_once_and_end_at_each_cadence(ends):
    schedule = CallSchedule(most=10, stop=64, varies=True, ends=ends, points=(33,))
    calls = tiles(schedule)
    taken = [step for first, last in calls for step in range(first, last + 1)]
    assert taken == list(range(1, 65))
    assert all(last - first < 10 for first, last in calls)
    lasts = {last for _, last in calls}
    assert lasts >= {x for each in (10, *ends) for x in range(each, 64, each)} | {33, 64}
    without_points = dataclasses.replace(schedule, points=())
    for first, last in tiles(without_points):
        assert {without_points.first(step) for step in range(first, last + 1)} == {first - 1}


def test_calls_of_different_lengths_build_no_workers(monkeypatch):
    setup = set_up(config_of(CONFIG))
    assert setup.schedule.varies
    monkeypatch.setattr(Workers, "build", lambda *_, **__: pytest.fail("built"))
    with setup.read_ahead(0) as feed:
        assert len(next(iter(feed))["mask"]) == setup.schedule.most


def test_calls_of_a_number_of_steps_are_all_alike():
    assert tiles(fixed_schedule(5, 15)) == [(1, 5), (6, 10), (11, 15)]


@pytest.mark.parametrize(
    ("seconds", "batch_bytes", "most"),
    [(1e-6, 100, MOST), (0.9e-3, 100, 22), (1e-3, 100, 1), (1e-6, 1 << 21, 7), (1e-6, 1 << 24, 1)],
)
def test_the_steps_of_a_call_follow_from_the_size_of_a_step(seconds, batch_bytes, most):
    config = config_of(CONFIG, ["steps=1000", "evaluate.every=0", "checkpoint.every=0"])
    schedule = auto_schedule(config, seconds, batch_bytes)
    assert (schedule.most, schedule.varies) == (most, most > 1)


def test_a_large_model_takes_one_step_a_call():
    schedule = set_up(config_of(CONFIG, ["model.width=1000000"])).schedule
    assert (schedule.most, schedule.varies) == (1, False)


def test_a_cadence_that_fits_nothing_is_said_with_the_way_to_change_it():
    config = config_of(CONFIG, ["steps=100", "evaluate.every=1", "checkpoint.every=7"])
    why = set_up(config).schedule.why
    assert why == (
        "steps_per_call: auto is 1 here, as evaluate.every is 1. With evaluate.every=7 or more it "
        "would be 7, which trains faster"
    )
    key, value = re.findall(r"With ([\w.]+=)(\d+)", why)[0]
    mended = config_of(CONFIG, ["steps=100", f"{key}{value}", "checkpoint.every=0"])
    assert set_up(mended).schedule.most == 7


@pytest.mark.parametrize("hooks", [(), (on_state(lambda step, state: None, every=3),)])
@pytest.mark.parametrize(
    "settings",
    [["steps=100", "evaluate.every=5 minutes"], ["steps=1 minute", "evaluate.every=20%"]],
)
def test_a_step_is_timed_with_the_program_of_the_run(settings, hooks, monkeypatch):
    """While a step is not timed yet, durations in time are taken to be one step."""
    timed = []
    measure = lambda setup: timed.append(setup.schedule) or 1e-3
    monkeypatch.setattr("jtrain.train.step_time.seconds_per_step", measure)
    setup = set_up_with_step_time(config_of(CONFIG, settings), hooks=hooks)
    assert setup.config.evaluate.every > 100
    assert setup.schedule.most == (3 if hooks else 5)  # as the hook, or checkpoint.every
    assert [schedule.most for schedule in timed] == [setup.schedule.most]


def test_iterations_of_a_scan_count():
    def loss(n):
        body = lambda x, _: (x @ x, None)
        return jax.make_jaxpr(lambda x: jax.lax.scan(body, x, None, length=n)[0])(np.eye(64))

    once, often = (loss_seconds(loss(n).jaxpr, "cpu", 1) for n in (1, 1000))
    assert often > 500 * once


def test_sets_that_do_not_exist_end_no_call():
    config = config_of(CONFIG, ["steps=100", "evaluate.every=2", "checkpoint.every=0"])
    assert auto_schedule(config, 1e-6, 100, evaluates=False).most == MOST


def test_the_log_says_how_many_steps_a_call_takes():
    outcome = trained(CONFIG, *CADENCES)
    assert (
        "steps_per_call: auto is 5 here, as checkpoint.every is 5."
        in outcome.directory.log.read_text()
    )


# The same results as one step a call.

LAYOUTS = {
    "single": "parallel.kind=single",
    "mirrored": "parallel={kind: mirrored, devices: 4}",
    "shard_map": "parallel={kind: mirrored, devices: 4, impl: shard_map}",
    "pmap": "parallel={kind: mirrored, devices: 4, impl: pmap}",
    "fsdp": "parallel={kind: fsdp, devices: 4, min_size: 0}",
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[] if x == "single" else pytest.mark.thorough) for x in LAYOUTS],
)
def test_a_run_takes_the_steps_of_one_step_a_call(layout):
    """Compare the states: the compiler may fuse the body of a loop in another way."""
    settings = (*CADENCES, LAYOUTS[layout], "microbatches=2")
    one = kept(trained(CONFIG, *settings, ONE, "name=one"))
    auto = kept(trained(CONFIG, *settings, "steps_per_call=auto", "name=auto"))
    rows = [[json.loads(line) for line in found.pop("metrics.jsonl").splitlines()]
            for found in (one, auto)]  # fmt: skip
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    assert one.keys() == auto.keys()
    for name, leaf in one.items():
        if leaf == auto[name]:
            continue
        # 23 updates from sums over 16 rows in another order, each off by a few parts in 1e7.
        assert_close(*(np.frombuffer(x, np.float32) for x in (auto[name], leaf)), within=1e-5)


def test_a_hook_changes_no_bit():
    """Train with batch norm and rounding, where a program for one step has other bits."""
    nothing = on_state(lambda step, state: None)
    states = []
    for hooks in ((), (nothing,)):
        setup = dataclasses.replace(set_up(numbers.config("run")), hooks=hooks)
        with setup.read_ahead(0) as feed:
            how = {"start": 0, "stop": 12, "hooks": hooks, "steps_per_call": setup.steps_per_call}
            states.append(train_loop(setup.compile_step(), setup.fresh(), feed, **how).state)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("ends", [(0, 7), pytest.param((0, 5, 1), marks=pytest.mark.thorough)])
def test_where_calls_end_changes_no_bit(ends):
    """Train with calls of up to 12 steps, of a mix, of 5, and of 1: the state has the same bits."""
    base = ("steps=12", "log.every=12", "checkpoint.every=0")
    states = []
    for every in ends:
        found = kept(trained(CONFIG, *base, f"evaluate.every={every}", f"name=run{every}"))
        states.append({k: v for k, v in found.items() if k != "metrics.jsonl"})
    assert all(state == states[0] for state in states[1:])


def test_a_run_that_was_cut_within_a_call_resumes_to_the_same_bits():
    """End a run at step 7, which no cadence names: a call of the whole run would pass it."""
    whole = kept(trained(CONFIG, *CADENCES, "name=whole"))
    stop = on_state(lambda step, state: jt.Stop("cut") if step == 7 else None, every=7)
    first = trained(CONFIG, *CADENCES, "name=cut", hooks=[stop])
    assert (first.step, first.status) == (7, "stopped")
    assert kept(trained(CONFIG, *CADENCES, "name=cut")) == whole


def test_a_resume_within_a_call_that_cannot_be_shorter_is_an_error():
    trained(CONFIG, "steps=5", ONE, "name=five", "checkpoint.every=0", "evaluate.every=0")
    longer = ("steps=12", "name=five", "checkpoint.every=0", "evaluate.every=0")
    with pytest.raises(ConfigError, match=r"from step 5, .*call=auto") as found:
        trained(CONFIG, *longer, "steps_per_call=2")
    (advice,) = re.findall(r"Set (\S+),", str(found.value))
    assert trained(CONFIG, *longer, advice).step == 12


def test_a_signal_ends_a_run_within_a_call():
    settings = ("steps=1000", "evaluate.every=0", "checkpoint.every=0", "log.every=1000")
    send = on_numbers(lambda step, numbers: os.kill(os.getpid(), signal.SIGTERM), every=60)
    outcome = trained(CONFIG, *settings, hooks=[send])
    assert outcome.status == "stopped"
    # Numbers of step 60 come after at most three more calls of 50 steps, and one more is taken.
    assert 60 <= outcome.step <= 100 + 4 * MOST


def test_functions_of_the_state_see_every_step():
    seen = []

    def look(step, state):
        seen.append((step, int(state.step)))

    outcome = trained(CONFIG, hooks=[look])
    assert seen == [(step, step) for step in range(1, 13)]
    log = outcome.directory.log.read_text()
    why = r"auto is 1 here, as a hook takes the state at every step. With on_state\(look, every="
    why += r"(\d)\) of jtrain.train.hooks it would be \d, which trains faster"
    (every,) = re.findall(why, log)
    hook = on_state(look, every=int(every))
    followed = trained(CONFIG, "name=followed", hooks=[hook]).directory.log.read_text()
    assert f"auto is {every} here, as checkpoint.every is {every}." in followed


class StateHook(jt.Hook):
    def on_state(self, step, state, metrics):
        """Take the state of every step."""


def test_calls_are_as_long_as_the_cadence_of_a_hook():
    """Or each call would read batches that its padding hides."""
    schedule = CallSchedule(most=50, stop=120, varies=True, ends=(60,))
    ending = schedule.ending_for(find_hook_ends([on_state(lambda step, state: None, every=7)]))
    assert ending.most == 7
    assert "With on_state(function, every=50) of jtrain.train.hooks it" in ending.why
    assert (
        "With every=50 for this hook it" in schedule.ending_for(find_hook_ends([StateHook()])).why
    )
    lasts = {last for _, last in tiles(ending)}
    assert lasts >= {*range(7, 120, 7), 50, 100, 60, 120}
    one = schedule.ending_for(find_hook_ends([on_state(lambda step, state: None)]))
    assert (one.most, one.steps(3)) == (LEAST, 1), "a program for one step has other bits"
    assert schedule.ending_for(find_hook_ends([on_numbers(lambda step, numbers: None)])) == schedule
    fixed = fixed_schedule(5, 20)
    assert fixed.ending_for(find_hook_ends([on_state(lambda step, state: None)])) == fixed


def test_fit_names_its_own_arguments(capsys):
    def loss(params, batch, rng):
        return jt.Mean.of((batch["x"][:, 0] * params["slope"] - 1) ** 2, batch["mask"])

    data = {"x": np.ones((40, 1), np.float32)}
    call = {"steps": 100, "batch": 8, "parallel": "single", "valid": data}
    jt.fit(loss, {"slope": np.float32(0)}, data, **call, valid_every=4)
    (advice,) = re.findall(
        r"auto is 4 here, as valid_every is 4. With valid_every=(\d+) or more",
        capsys.readouterr().out,
    )
    jt.fit(loss, {"slope": np.float32(0)}, data, **call, valid_every=int(advice))
    assert f"auto is {advice} here, as" in capsys.readouterr().out
    jt.fit(loss, {"slope": np.float32(0)}, data, **call)
    default = r"auto is 10 here, as the default of valid_every is 10\. With valid_every=\d+ or more"
    assert re.search(default, capsys.readouterr().out)


def test_trackers_get_the_rows_of_one_step_a_call(monkeypatch):
    sent = []

    class Rows:
        id = "1"

        def write(self, step, numbers):
            sent[-1].append((step, {k: x for k, x in numbers.items() if "loss" in k}))

        def close(self, end):
            sent[-1].append((end, {}))

    monkeypatch.setattr(TensorBoard, "package", "json")  # which everyone has
    monkeypatch.setattr(TensorBoard, "open", lambda self, about: Rows())
    for calls in (ONE, "steps_per_call=auto"):
        sent.append([])
        name = f"name=run{len(sent)}"
        trained(CONFIG, *CADENCES, "trackers=[{kind: tensorboard}]", calls, name)
    one, auto = sent
    assert [step for step, _ in auto] == [step for step, _ in one]
    assert one[-1] == ("done", {})
    for (_, expected), (_, found) in zip(one, auto, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)  # as in the run itself


def test_functions_of_the_numbers_see_every_step_in_order():
    seen = []
    trained(CONFIG, *CADENCES, hooks=[lambda step, numbers: seen.append(step)])
    assert seen == list(range(1, 24))


def test_a_short_call_is_padded_and_marked():
    batches = mark_live({"x": np.arange(6.0).reshape(3, 2)}, most=5)
    assert batches["x"].shape == (5, 2)
    np.testing.assert_array_equal(batches[LIVE], [[True] * 2] * 3 + [[False] * 2] * 2)
    again = mark_live({"x": np.zeros((3, 2))}, most=5)
    assert again[LIVE] is batches[LIVE], "it would be put on the devices at each call"
