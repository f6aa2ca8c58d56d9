import math

import pytest

from jtrain.hooks import Finite
from jtrain.loop import Stop


def look(finite, step, skipped, loss=math.nan):
    return finite.on_numbers(step, {"skipped": float(skipped), "loss": loss, "grad_norm": math.inf})


def test_finite_steps_are_silent():
    said = []
    finite = Finite(every=10, tell=said.append)
    assert [look(finite, step, 0.0, 1.0) for step in (10, 20, 30)] == [None] * 3
    assert said == []


def test_some_skipped_steps_are_one_warning():
    said = []
    finite = Finite(every=10, tell=said.append)
    assert [look(finite, step, skipped) for step, skipped in ((10, 0), (20, 3), (30, 3))] == [
        None
    ] * 3
    (line,) = said
    assert line.startswith("steps 11 to 20: 3 of 10 skipped")
    assert "optimizer.lr" in line


def test_a_run_in_which_every_step_was_skipped_stops_and_says_what_to_try():
    said = []
    finite = Finite(every=10, tell=said.append)
    look(finite, 10, 0)
    stop = look(finite, 20, 10)
    assert isinstance(stop, Stop)
    assert stop.kind == "failed"
    for part in (
        "no step from 11 to 20 was finite: loss nan, gradient norm inf",
        "parameters are those of the last finite step",
        "data for NaN",
        "lower optimizer.lr",
        "optimizer.clip=1.0",
        "--find-nan",
    ):
        assert part in stop.why
    assert said == []


def test_at_a_cadence_of_one_the_first_bad_step_stops():
    finite = Finite(every=1, tell=pytest.fail)
    assert look(finite, 1, 0) is None
    assert isinstance(look(finite, 2, 1), Stop)


def test_a_resumed_run_counts_from_where_it_was():
    said = []
    finite = Finite(every=10, tell=said.append, start=29, skipped=7)
    assert look(finite, 30, 7) is None
    assert look(finite, 40, 8) is None
    assert len(said) == 1
    lone = Finite(every=10, tell=said.append, start=29, skipped=7)
    assert look(lone, 30, 8) is None  # one step alone is no trend
    assert len(said) == 2


def scaled(finite, step, skipped, scale):
    numbers = {"skipped": float(skipped), "loss": 1.0, "grad_norm": math.inf, "loss_scale": scale}
    return finite.on_numbers(step, numbers)


def test_a_loss_scale_that_finds_its_place_is_silent():
    finite = Finite(every=10, tell=pytest.fail, minimum=1.0)
    assert scaled(finite, 10, 4, 2048.0) is None
    assert scaled(finite, 20, 14, 2.0) is None


def test_an_overflow_at_the_least_loss_scale_stops_the_run_and_says_what_to_set():
    finite = Finite(every=10, tell=pytest.fail, minimum=1.0)
    assert scaled(finite, 10, 0, 1.0) is None
    stop = scaled(finite, 20, 3, 1.0)
    assert stop is not None
    assert stop.kind == "failed"
    for part in ("minimum of 1", "3 of the steps 11 to 20", "precision.kind=bf16", "optimizer.lr"):
        assert part in stop.why
