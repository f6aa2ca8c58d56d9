"""Patience: stuck processes are late, slow ones are not."""

import pytest

from jtrain.distributed.heartbeat import Beat, Patience, WatchedProcess
from jtrain.distributed.heartbeat.heartbeat import PHASES
from jtrain.distributed.heartbeat.patience import FLOORS
from jtrain.errors import UserError


def beat(number: int, phase: str = "step", step: int = 0, seconds: float = 0.0) -> Beat:
    return Beat(number, phase, step, seconds, 0, 0.0, "")


def test_every_phase_has_a_floor():
    assert {Patience().seconds(phase, 1.0) for phase in PHASES} <= set(FLOORS.values())


def test_a_process_is_late_when_its_phase_lasts_too_long():
    watched = WatchedProcess(Patience.parse("10"))
    assert not watched.update(beat(1, "data"), 1.0)
    assert not watched.update(beat(1, "data"), 9.0)
    assert watched.update(beat(1, "data"), 1.5)
    assert not watched.update(beat(2, "step"), 1.0), "a new beat"


def test_a_step_may_take_five_of_its_kind():
    watched = WatchedProcess(Patience.parse("10"))
    for number in range(1, 20):  # 4 s each
        watched.update(beat(number, "step", number, 4.0 * number), 4.0)
    assert watched.step_seconds == 4.0
    assert not watched.update(beat(19, "step", 19, 76.0), 19.0)
    assert watched.update(beat(19, "step", 19, 76.0), 2.0)


def test_steps_quicker_than_the_observations_are_counted():
    watched = WatchedProcess(Patience())
    for number in range(1, 5):
        watched.update(beat(number, "step", 100 * number, float(number)), 1.0)
    assert watched.step_seconds == pytest.approx(0.01)


def test_a_compilation_of_a_minute_is_not_late():
    watched = WatchedProcess(Patience())
    assert not any(watched.update(beat(1, "compile"), 0.02) for _ in range(3000))


def test_the_first_step_may_take_as_long_as_its_compilation():
    assert Patience.parse("step=5,compile=300").seconds("step", None) == 300


def test_a_jump_of_the_clock_is_not_late(monkeypatch):
    """Time between observations counts; the time in a beat serves the median step only."""
    watched = WatchedProcess(Patience.parse("10"))
    watched.update(beat(1, "data", 1, seconds=0.0), 0.02)
    assert not watched.update(beat(1, "data", 1, seconds=0.0), 0.02)
    assert not watched.update(beat(2, "data", 2, seconds=7200.0), 0.02)
    assert not watched.update(beat(3, "data", 3, seconds=3600.0), 0.02)


def test_patience_is_typed_for_all_phases_or_for_some():
    assert set(Patience.parse("60").floors.values()) == {60.0}
    some = Patience.parse("step=30, eval=600").floors
    assert (some["step"], some["eval"], some["save"]) == (30.0, 600.0, FLOORS["save"])
    assert Patience.parse("10").times(3.0).floors["data"] == 30.0


@pytest.mark.parametrize("text", ["soon", "steps=30", "step=", "0", "-3", "step=30,", "nan"])
def test_an_invalid_patience_is_refused_with_advice(text: str):
    with pytest.raises(UserError, match=r"the phases are start, compile.*Type --patience 60"):
        Patience.parse(text)


def test_an_unknown_phase_is_named():
    with pytest.raises(UserError, match=r"^patience 'stp=3': stp is no phase.*mean step\? Type"):
        Patience.parse("stp=3")
