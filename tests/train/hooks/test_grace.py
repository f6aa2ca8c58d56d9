"""A run that could not save within its grace period warns in time."""

from jtrain.train.hooks.grace_period import IN_FLIGHT, GracePeriod


def grace(told: list[str], call: float | None, save: float | None) -> GracePeriod:
    return GracePeriod(
        25.0,
        every=1,
        call=lambda: call,
        save=lambda: save,
        cadence="500 steps",
        log=told.append,
    )


def test_is_silent_while_times_are_unknown_or_fit():
    told: list[str] = []
    for call, save in ((None, None), (100.0, None), (None, 100.0), (1.0, 25.0 - IN_FLIGHT)):
        hook = grace(told, call, save)
        hook.on_numbers(1, {})
        assert hook.fits()
    assert told == []


def test_a_grace_period_that_is_too_short_is_reported_once():
    told: list[str] = []
    hook = grace(told, 1.0, 21.0)
    for step in (1, 2):
        hook.on_numbers(step, {})
    (line,) = told
    assert not hook.fits()
    assert "0:25 are too short for the steps in flight and a save, about 0:30" in line
    assert "resumes from the last checkpoint, saved every 500 steps" in line
    assert "set checkpoint.grace=45" in line
