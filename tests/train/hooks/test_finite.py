import math

import pytest

from jtrain.core.loop import Stop
from jtrain.train.hooks.skipped_steps import RecentSteps, SkippedSteps, StepMetrics


class Steps(RecentSteps):
    """Steps as they were taken, without arrays, and a count of those skipped so far."""

    def __init__(self, skipped: int = 0):
        super().__init__()
        self.taken: list[StepMetrics] = []
        self._skipped = skipped

    def take(self, step, *, loss=1.0, norm=1.0, scale=math.nan, extra=False) -> dict[str, float]:
        """Return the numbers of a step as a hook gets them."""
        self._skipped += extra or not math.isfinite(loss + norm)
        self.taken.append(StepMetrics(step, loss, norm, self._skipped, scale))
        return {"skipped": float(self._skipped), "loss": loss, "grad_norm": norm}

    def read(self, step):
        return [told for told in self.taken if told.step <= step]

    def forget(self, step):
        self.taken = [told for told in self.taken if told.step > step]


def walk(finite, steps, start, stop, **fault):
    """Return the first stop of steps `start` .. `stop`, with the bad steps `fault["at"]`."""
    at, bad = fault.pop("at", ()), {"loss": math.nan, "norm": math.nan} | fault
    for step in range(start, stop + 1):
        numbers = steps.take(step, **(bad if step in at else {}))
        asked = finite.on_numbers(step, numbers) if step % finite.every == 0 else None
        if asked:
            return step, asked
    return None


def made(**options):
    steps, said = Steps(options.get("skipped", 0)), []
    return SkippedSteps(recent=steps, log=said.append, **options), steps, said


def test_finite_steps_are_silent():
    finite, steps, said = made()
    assert walk(finite, steps, 1, 60) is None
    assert said == []


def test_some_skipped_steps_are_one_warning():
    finite, steps, said = made(log_every=20)
    assert walk(finite, steps, 1, 60, at=(21, 23, 38)) is None
    (line,) = said
    assert line.startswith("steps 21 to 40: 3 of 20 skipped")
    assert "The others were taken; if this continues, lower optimizer.lr" in line


def test_as_many_in_a_row_as_the_window_has_stop_the_run_and_say_what_to_try():
    finite, steps, said = made(window=20, log_every=1000)
    assert walk(finite, steps, 1, 100, at=range(7, 26)) is None, "one less is no end"
    step, stop = walk(finite, steps, 101, 200, at=range(105, 300)) or pytest.fail("it goes on")
    assert step == 130, "the first look after step 124"
    assert isinstance(stop, Stop)
    assert stop.kind == "failed"
    for part in (
        "no step from 105 to 124 was finite: loss nan, gradient norm nan.",
        "guard.window is the number",
        "parameters are those of the last finite step",
        "data for NaN",
        "lower optimizer.lr",
        "optimizer.clip=1.0",
        "--find-nan",
    ):
        assert part in stop.why
    assert said == []


@pytest.mark.parametrize("broken", [3, 9, 10, 13, 29])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(broken):
    finite, steps, _ = made(window=25)
    never = walk(finite, steps, 1, 60, at=range(4, 60))
    finite, steps, _ = made(window=25)
    assert walk(finite, steps, 1, broken, at=range(4, 60)) is None
    finite.catch_up(broken)
    skipped = max(0, broken - 3)
    finite, steps, _ = made(window=25, start=broken, skipped=skipped, known=finite.state())
    again = walk(finite, steps, broken + 1, 60, at=range(4, 60))
    assert again is not None
    assert again == never
    assert again[0] == 30


def test_too_many_recent_skips_stop_it_also_after_a_resume():
    finite, steps, _ = made(most=3, within=20)
    assert walk(finite, steps, 1, 30, at=(2, 4, 25)) is None
    step, stop = walk(finite, steps, 31, 60, at=(33, 41)) or pytest.fail("it goes on")
    assert step == 50
    assert "3 steps within 20 were skipped, and guard.most is 3: step 41 is not finite" in stop.why
    finite, steps, _ = made(most=3, within=20)
    assert walk(finite, steps, 1, 36, at=(25, 33)) is None
    finite.catch_up(36)
    finite, steps, _ = made(most=3, within=20, start=36, skipped=2, known=finite.state())
    step, _ = walk(finite, steps, 37, 60, at=(41,)) or pytest.fail("it goes on")
    assert step == 50


def test_each_skipped_step_is_an_event_once_whenever_a_state_is_kept():
    found = []
    finite, steps, _ = made(event=found.append)
    for step in range(1, 41):
        numbers = steps.take(step, **({"norm": math.inf} if step in (7, 13, 20) else {}))
        if step in (8, 20, 21):
            finite.catch_up(step)
        if step % finite.every == 0:
            finite.on_numbers(step, numbers)
    assert [bad.step for bad in found] == [7, 13, 20]
    assert found[0].what == "is not finite: loss 1, gradient norm inf"


def test_a_change_of_extra_is_called_by_its_name():
    found = []
    finite, steps, _ = made(event=found.append, minimum=1.0)
    walk(finite, steps, 1, 10, at=(4,), loss=1.0, norm=1.0, extra=True, scale=8.0)
    assert [bad.what for bad in found] == ["makes extra non-finite: loss 1"]


# float16


def test_a_loss_scale_that_finds_its_place_is_silent():
    finite, steps, said = made(minimum=1.0, event=pytest.fail)
    assert walk(finite, steps, 1, 200, at=range(200), loss=1.0, norm=math.inf, scale=2.0) is None
    assert said == []


def test_an_overflow_at_the_least_loss_scale_stops_the_run_and_says_what_to_set():
    finite, steps, said = made(minimum=1.0)
    overflow = {"loss": 1.0, "norm": math.inf}
    assert walk(finite, steps, 1, 10, at=(9,), scale=2.0, **overflow) is None
    step, stop = walk(finite, steps, 11, 30, at=(13,), scale=1.0, **overflow) or pytest.fail(
        "it goes on"
    )
    assert (step, stop.kind) == (20, "failed")
    for part in (
        "step 13 overflowed float16 at the smallest loss scale, precision.minimum=1.",
        "precision.kind=bf16",
        "optimizer.lr",
    ):
        assert part in stop.why
    assert said == []


@pytest.mark.parametrize("scale", [1.0, 2.0**15])
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_not_blamed_on_the_scale(loss, scale):
    found = []
    finite, steps, said = made(minimum=1.0, event=found.append)
    assert walk(finite, steps, 1, 10, at=(9,), loss=loss, scale=scale) is None
    assert [bad.step for bad in found] == [9]
    assert len(said) == 1
