"""A run that could not save within its grace period warns in time."""

from jtrain.core.loop import IN_FLIGHT
from jtrain.train.hooks.signals import GraceBudget, GracePeriod


def grace(told: list[str], budget: GraceBudget, call: float | None) -> GracePeriod:
    return GracePeriod(
        budget,
        every=1,
        call=lambda: call,
        cadence="500 steps",
        log=told.append,
    )


def test_is_silent_while_times_are_unknown_or_fit():
    told: list[str] = []
    for call, save in ((None, None), (100.0, None), (None, 100.0), (1.0, 24.0 - IN_FLIGHT)):
        budget = GraceBudget(25.0, save=save)
        hook = grace(told, budget, call)
        hook.on_numbers(1, {})
        assert budget.fits()
    assert told == []


def test_only_calls_in_flight_count():
    assert GraceBudget(25.0, call=2.0, save=10.0).needed == 28.0
    assert GraceBudget(25.0, call=2.0, save=10.0, in_flight=2).needed == 16.0


def test_a_grace_period_that_is_too_short_is_reported_once():
    told: list[str] = []
    budget = GraceBudget(25.0, save=21.0)
    hook = grace(told, budget, 1.0)
    for step in (1, 2):
        hook.on_numbers(step, {})
    (line,) = told
    assert not budget.fits()
    assert "0:25 are too short for the steps in flight and a save, about 0:30" in line
    assert "resumes from the last checkpoint, saved every 500 steps" in line
    assert "set checkpoint.grace=45" in line
