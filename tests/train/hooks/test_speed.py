import itertools
import json
import statistics
import time

import jax
import numpy as np
import pytest

from jtrain.core.loop import train_loop
from jtrain.core.mean import Mean
from jtrain.train.hooks import Speed
from jtrain.train.hooks.speed import StepWork
from jtrain.train.memory_use import MemoryUse, measure_memory
from jtrain.train.speed_summary import format_speed, read_speed


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def speed_of(clock, **more):
    return Speed(None, **{"every": 2, "stop": 100, "rows": 8, "clock": clock, **more})


def train(speed, clock, first, last, *, seconds):
    """Report steps that take `seconds` each, as the loop does."""
    for step in range(first, last + 1):
        clock.now += seconds
        if step % speed.every == 0:
            speed.on_numbers(step, {})


def test_steps_are_timed_without_the_first_call():
    clock = Clock()
    speed = speed_of(clock, tokens=512)
    clock.now += 60  # compiling
    train(speed, clock, 1, 1, seconds=0.5)
    assert speed.pace is None
    train(speed, clock, 2, 10, seconds=0.5)
    assert speed.pace is not None
    assert speed.pace.step == 10
    assert speed.pace.seconds_per_step == pytest.approx(0.5)
    assert speed.pace.ms_per_step == pytest.approx(500)
    assert speed.pace.steps_per_second == pytest.approx(2)
    assert speed.pace.rows_per_second == pytest.approx(16)
    assert speed.pace.tokens_per_second == pytest.approx(1024)
    assert speed.pace.left == pytest.approx(45)


def test_a_pause_is_no_time_of_a_step_but_counts_for_what_is_left():
    clock = Clock()
    speed = speed_of(clock)
    train(speed, clock, 1, 11, seconds=0.5)
    with speed.pause():
        clock.now += 20
        with speed.pause():  # one in another counts once
            clock.now += 10
    train(speed, clock, 12, 21, seconds=0.5)
    assert speed.pace is not None
    assert speed.pace.seconds_per_step == pytest.approx(0.5)
    assert speed.paused == 30
    assert speed.pace.left == pytest.approx(80 * (0.5 + 30 / 19))


def test_a_pause_that_fails_ends():
    clock = Clock()
    speed = speed_of(clock)
    with pytest.raises(ZeroDivisionError), speed.pause():
        clock.now += 5 / (clock.now - clock.now)
    clock.now += 5
    train(speed, clock, 1, 9, seconds=0.5)
    assert speed.pace is not None
    assert speed.pace.seconds_per_step == pytest.approx(0.5)


def test_the_pace_is_that_of_the_last_seconds():
    clock = Clock()
    speed = speed_of(clock, window=10.0)
    train(speed, clock, 1, 30, seconds=1.0)
    train(speed, clock, 31, 60, seconds=0.5)
    assert speed.pace is not None
    assert speed.pace.seconds_per_step == pytest.approx(0.5)


def test_the_share_of_time_that_waits_for_data_is_measured():
    clock = Clock()
    speed = speed_of(clock, waited=lambda: (clock.now - 100) / 4)
    train(speed, clock, 1, 9, seconds=0.5)
    assert speed.pace is not None
    assert speed.pace.waiting == pytest.approx(0.25)


def test_a_step_inside_a_call_is_done_when_its_call_is():
    clock = Clock()
    speed = speed_of(clock, every=25, steps_per_call=10)
    told = []
    for last in range(10, 101, 10):
        clock.now += 1.0
        for step in range(last - 9, last + 1):
            if step % speed.every == 0:
                speed.on_numbers(step, {})
                told.append(step)
    assert told == [10, 25, 50, 75, 100]
    assert speed.pace is not None
    assert speed.pace.seconds_per_step == pytest.approx(0.1)


def test_a_clock_that_stands_still_breaks_nothing():
    clock = Clock()
    speed = speed_of(clock)
    train(speed, clock, 1, 8, seconds=0.0)
    assert speed.pace is None


def test_rows_are_appended_and_those_past_a_resume_dropped(tmp_path):
    path = tmp_path / "speed.jsonl"
    for start in (None, 4):
        clock = Clock()
        speed = Speed(path, every=2, stop=8, rows=8, clock=clock, resumed_at=start)
        train(speed, clock, (start or 0) + 1, 8, seconds=0.5)
        speed.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in found] == [2, 4, 6, 8]
    assert found[-1] == {
        "step": 8,
        "seconds_per_step": 0.5,
        "rows_per_second": 16.0,
        "waiting": 0.0,
        "left": 0.0,
        "trained": 1.5,
        "paused": 0.0,
    }


def test_utilization_is_work_by_time_and_peak(tmp_path):
    clock = Clock()
    work = StepWork(model=3e12, hardware=4e12, peak=1e13)
    speed = Speed(tmp_path / "s", every=2, stop=100, rows=8, clock=clock, work=work)
    train(speed, clock, 1, 11, seconds=0.5)
    assert speed.pace is not None
    assert (speed.pace.mfu, speed.pace.hfu) == pytest.approx((0.6, 0.8))
    speed.close()
    assert json.loads((tmp_path / "s").read_text().splitlines()[-1])["mfu"] == pytest.approx(0.6)


def test_work_that_is_unknown_gives_no_utilization():
    clock = Clock()
    speed = speed_of(clock, work=StepWork(model=None, hardware=None, peak=1e13))
    train(speed, clock, 1, 11, seconds=0.5)
    assert speed.pace is not None
    assert speed.pace.mfu is None
    assert speed.pace.hfu is None


def test_quantiles_are_of_single_calls():
    clock = Clock()
    speed = speed_of(clock, every=10)
    for step in range(1, 101):
        clock.now += 0.5 if step % 5 else 2.0
        speed.on_done(step)
        if step % speed.every == 0:
            speed.on_numbers(step, {})
    assert speed.pace is not None
    assert speed.pace.p50 == pytest.approx(0.5)
    assert speed.pace.p90 == pytest.approx(2.0)
    assert speed.pace.seconds_per_step == pytest.approx((4 * 0.5 + 2.0) / 5, rel=0.1)


def test_quantiles_leave_out_pauses_and_the_first_call():
    clock = Clock()
    speed = speed_of(clock, steps_per_call=4, every=4)
    clock.now += 60
    for step in range(4, 401, 4):
        if step == 200:
            with speed.pause():
                clock.now += 30
        clock.now += 2.0
        speed.on_done(step)
        speed.on_numbers(step, {})
    assert speed.pace is not None
    assert speed.pace.p50 == speed.pace.p90 == pytest.approx(0.5)


def test_the_first_row_has_what_came_before(tmp_path):
    clock = Clock()
    memory = MemoryUse(7, 9, "device")
    path = tmp_path / "speed.jsonl"
    begins = {"began": lambda: {"compile": 3.0}, "memory": lambda: memory}
    speed = Speed(path, every=1, stop=9, rows=8, clock=clock, **begins)
    train(speed, clock, 1, 4, seconds=0.5)
    speed.close()
    first, *rest = map(json.loads, path.read_text().splitlines())
    assert (first["compile"], first["first_call"]) == (3.0, 0.5)
    assert all("compile" not in row for row in rest)
    assert {(r["device_memory"], r["device_memory_peak"]) for r in rest} == {(7, 9)}
    found = read_speed(path)
    assert found is not None
    assert (found.compile, found.memory_peak, found.seconds_per_step) == (3.0, 9, 0.5)
    assert "of the device, at most so far" in format_speed(found)


def test_a_step_is_timed_when_it_is_done():
    """A call that returns at once and takes 20 ms has a p50 of 20 ms, or of what it really took."""
    ended = []

    def slow(x):
        time.sleep(0.02)
        ended.append(time.perf_counter())
        return x

    def step(state, batch):
        out = jax.pure_callback(slow, jax.ShapeDtypeStruct((), "float32"), batch["x"])
        return state, {"loss": Mean(out, jax.numpy.float32(1))}

    compiled = jax.jit(step)
    feed = [{"x": jax.device_put(np.float32(i))} for i in range(24)]
    speed = Speed(None, every=4, stop=24, rows=1)
    train_loop(compiled, jax.device_put(np.float32(0)), feed, start=0, stop=24, hooks=[speed])
    assert speed.pace is not None
    assert speed.pace.p50 is not None
    took = statistics.median(end - before for before, end in itertools.pairwise(ended))
    assert 0.02 <= speed.pace.p50 < 2 * took


def test_memory_is_the_fullest_device_or_the_process():
    class Device:
        def __init__(self, used, peak):
            self._stats = {"bytes_in_use": used, "peak_bytes_in_use": peak}

        def memory_stats(self):
            return self._stats

    assert measure_memory([Device(3, 9), Device(5, 7)]) == MemoryUse(5, 9, "device")
    process = measure_memory(jax.devices("cpu"))
    assert process.of == "process"
    assert 50e6 < process.in_use <= process.peak
    held = np.ones(25_000_000)  # 200 MB
    assert measure_memory(jax.devices("cpu")).in_use > process.in_use + held.nbytes / 2
