import json

import pytest

from jtrain.train.hooks import Speed
from jtrain.train.hooks.speed import StepWork


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
