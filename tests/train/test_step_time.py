"""Durations in time become steps by a step time that is measured once."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from quick_study import at_home, config_of, kept, trained, write_study

import jtrain as jt
from jtrain.config.dump import flatten
from jtrain.core.loop import Hook
from jtrain.errors import ConfigError
from jtrain.train.hooks.metrics import read_results
from jtrain.train.restore_run import evaluate_run
from jtrain.train.setup import set_up
from jtrain.train.step_time import set_up_with_step_time

CONFIG = "configs/quick.yaml"
IN_TIME = [
    "steps=1.2 seconds",
    "evaluate.every=0.4 seconds",
    "log.every=0.2 seconds",
    "checkpoint.every=0.3 seconds",
    "evaluate.patience=2 seconds",
    "checkpoint.best=loss",
    "optimizer.schedule={kind: cosine, warmup: 0.3 seconds}",
]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)


@pytest.fixture
def a_tenth(monkeypatch: pytest.MonkeyPatch):
    """Make a step take a tenth of a second for any measurement."""
    monkeypatch.setattr("jtrain.train.step_time.seconds_per_step", lambda parts: 0.1)


@pytest.mark.usefixtures("a_tenth")
@pytest.mark.parametrize(
    ("setting", "key", "steps"),
    [
        ("steps=1.2 seconds", "steps", 12),
        ("steps=1 minute", "steps", 600),
        ("evaluate.every=0.31 seconds", "evaluate.every", 4),
        ("log.every=0.01 seconds", "log.every", 1),
        ("log.leaves=1 hour", "log.leaves", 36_000),
        ("optimizer.schedule={kind: cosine, warmup: 0.5 seconds}", "optimizer.schedule.warmup", 5),
    ],
)
def test_a_time_is_the_steps_that_take_it(setting, key, steps):
    assert flatten(set_up_with_step_time(config_of(CONFIG, [setting])).config)[key] == steps
    calls = set_up_with_step_time(
        config_of(CONFIG, [setting, "steps_per_call=6", "checkpoint.every=6"])
    ).config
    whole = steps if key.startswith(("optimizer", "log.every")) else -(-steps // 6) * 6
    assert flatten(calls)[key] in (whole, -(-steps // 6) * 6)


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
            set_up_with_step_time(config_of(CONFIG, asked)).config.evaluate.patience == evaluations
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
    monkeypatch.setattr("jtrain.train.step_time.seconds_per_step", lambda parts: 0.1)
    with pytest.raises(KilledError):
        trained(CONFIG, *IN_TIME, "checkpoint.every=2", hooks=[Kill(9)])
    monkeypatch.setattr(
        "jtrain.train.step_time.seconds_per_step", lambda parts: pytest.fail("measured again")
    )
    ended = trained(CONFIG, *IN_TIME, "checkpoint.every=2")
    assert (ended.status, ended.step) == ("done", 12)
    assert "resumes from step" in ended.directory.log.read_text()
    assert list(read_results(ended.directory.metrics, "valid")) == [4, 8, 12]
    typed = ["steps=12", "evaluate.every=4", "log.every=2", "checkpoint.best=loss"]
    typed += ["optimizer.schedule={kind: cosine, warmup: 3}", "checkpoint.every=2"]
    assert kept(trained(CONFIG, *typed, "name=typed")) == kept(ended)
    assert evaluate_run(config_of(ended.directory.config), ended.directory.path)[0] == 12


@pytest.mark.thorough
def test_what_a_step_takes_is_measured_once_and_kept(tmp_path):
    x = np.array([[0], [1], [2], [3]], np.float32)

    def squared(params, batch, rng):
        error = batch["x"][:, 0] * params["slope"] - batch["y"][:, 0]
        return jt.Mean.of(error**2, batch["mask"])

    result = jt.fit(
        squared,
        {"slope": np.float32(0)},
        {"x": x, "y": 2 * x},
        steps="0.02 seconds",
        batch=4,
        parallel="single",
        directory=tmp_path / "fitted",
        quiet=True,
    )
    seconds = json.loads((tmp_path / "fitted" / "run.json").read_text())["seconds_per_step"]
    assert 1e-6 < seconds < 1
    assert result.step == max(1, math.ceil(0.02 / seconds))
    said = (tmp_path / "fitted" / "log.txt").read_text()
    assert re.search(rf"steps: 0.02 seconds is {result.step} steps of [0-9.]+ (u|m)s", said)


def test_a_run_of_one_step_is_timed_with_a_program_of_two(tmp_path):
    loss = lambda params, batch, rng: jt.Mean.of(
        (batch["x"] * params["slope"])[:, 0], batch["mask"]
    )
    data = {"x": np.ones((4, 1), np.float32)}
    call = {"steps": 1, "batch": 4, "parallel": "single", "directory": tmp_path / "one"}
    start = {"slope": np.float32(1)}
    assert jt.fit(loss, start, data, valid=data, valid_every="1 minute", **call).step == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["steps=1 minute", "optimizer.schedule={kind: cosine, warmup: 90 seconds}"],
            r"optimizer.schedule.warmup: 90 seconds is no shorter than the run, which lasts "
            r"1 minute. Lower it \(optimizer.schedule.warmup=10%\)",
        ),
        (
            ["evaluate.patience=1 minute", "evaluate.every=0", "checkpoint.best=loss"],
            r"evaluate.patience: 1 minute is counted by evaluations.*Set evaluate.every",
        ),
        (
            ["steps=90000 days"],
            r"steps: 77760000000 is more than can be counted; at most 2147483647",
        ),
    ],
)
@pytest.mark.usefixtures("a_tenth")
def test_values_that_do_not_fit_are_reported(settings, words):
    with pytest.raises(ConfigError, match=words):
        set_up_with_step_time(config_of(CONFIG, settings))


def test_what_only_looks_at_a_run_measures_nothing():
    parts = set_up(config_of(CONFIG, IN_TIME))
    assert parts.lengths.provisional
    assert parts.config.steps == pytest.approx(10**6, abs=1)
    warmup = flatten(parts.config)["optimizer.schedule.warmup"]
    assert warmup == pytest.approx(10**6 / 4, abs=1), "a quarter of the time, so of the steps"
