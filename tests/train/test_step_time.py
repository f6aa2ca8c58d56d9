"""Durations in time become steps by a step time that is measured once."""

import pytest
from quick_study import config_of, kept, trained

from jtrain.config.dump import flatten
from jtrain.core.loop import Hook
from jtrain.train.compile_step import resolve_with_step_time
from jtrain.train.hooks.log import read_results
from jtrain.train.restore import evaluate_run

pytestmark = pytest.mark.usefixtures("study_home")
CONFIG = "configs/quick.yaml"
IN_TIME = [
    *("steps=1.2 seconds", "evaluate.every=0.4 seconds", "log.every=0.2 seconds"),
    *("checkpoint.every=0.3 seconds", "evaluate.patience=2 seconds", "checkpoint.best=loss"),
    "optimizer.schedule={kind: cosine, warmup: 0.3 seconds}",
]


@pytest.fixture
def a_tenth(monkeypatch: pytest.MonkeyPatch):
    """Make a step take a tenth of a second for any measurement."""
    monkeypatch.setattr("jtrain.train.compile_step.seconds_per_step", lambda parts: 0.1)


@pytest.mark.usefixtures("a_tenth")
@pytest.mark.parametrize(
    ("setting", "key", "steps"),
    [
        ("steps=1.2 seconds", "steps", 12),
        ("evaluate.every=0.31 seconds", "evaluate.every", 4),
        ("optimizer.schedule={kind: cosine, warmup: 0.5 seconds}", "optimizer.schedule.warmup", 5),
    ],
)
def test_a_time_is_the_steps_that_take_it(setting, key, steps):
    assert flatten(resolve_with_step_time(config_of(CONFIG, [setting])).config)[key] == steps


@pytest.mark.usefixtures("a_tenth")
def test_patience_in_any_unit_is_so_many_evaluations():
    for said, evaluations in {
        "5": 5,
        "5 evaluations": 5,
        "9 steps": 3,
        "1 second": 4,
        "1 epoch": 5,
        "50%": 2,
    }.items():
        asked = [f"evaluate.patience={said}", "evaluate.every=3", "checkpoint.best=loss"]
        assert (
            resolve_with_step_time(config_of(CONFIG, asked)).config.evaluate.patience == evaluations
        ), said


class KilledError(Exception):
    """Error that ends a process."""


class Kill(Hook):
    """Ends it at a step."""

    def __init__(self, at: int):
        self.at = at

    def on_numbers(self, step, numbers):
        """Raise, so that nothing is finished."""
        if step == self.at:
            raise KilledError


@pytest.mark.thorough
def test_a_killed_run_resumes_with_the_same_numbers(monkeypatch):
    monkeypatch.setattr("jtrain.train.compile_step.seconds_per_step", lambda parts: 0.1)
    with pytest.raises(KilledError):
        trained(CONFIG, *IN_TIME, "checkpoint.every=2", hooks=[Kill(9)])
    monkeypatch.setattr(
        "jtrain.train.compile_step.seconds_per_step", lambda parts: pytest.fail("measured again")
    )
    ended = trained(CONFIG, *IN_TIME, "checkpoint.every=2")
    assert (ended.status, ended.step) == ("done", 12)
    assert "resumes from step" in ended.directory.log.read_text()
    assert list(read_results(ended.directory.metrics, "valid")) == [4, 8, 12]
    typed = ["steps=12", "evaluate.every=4", "log.every=2", "checkpoint.best=loss"]
    typed += ["optimizer.schedule={kind: cosine, warmup: 3}", "checkpoint.every=2"]
    assert kept(trained(CONFIG, *typed, "name=typed")) == kept(ended)
    assert evaluate_run(config_of(ended.directory.config), ended.directory.path)[0] == 12
