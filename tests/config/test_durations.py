"""A duration comes to the steps that counting by hand gives, and says what it cannot be."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from quick_study import config_of, trained

from jtrain.config.durations import DurationUnits, convert_durations, find_durations, find_own_steps
from jtrain.core.loop import FinishedSteps
from jtrain.errors import ConfigError
from jtrain.train.hooks.log import read_results
from jtrain.train.program import set_up
from jtrain.train.save import SaveHook

pytestmark = pytest.mark.usefixtures("study_home")
CONFIG = "configs/quick.yaml"


@pytest.mark.parametrize(
    ("said", "steps"),
    [
        ("3 epochs", math.ceil(3 * 200 / 16)),  # 200 rows, 16 a step
        ("500 rows", math.ceil(500 / 16)), ("481 rows", 31),
        ("10k tokens", math.ceil(10_000 / (16 * 7))), ("40 steps", 40), ("10%", 100),
    ],
)  # fmt: skip
def test_comes_to_the_steps_that_are_counted_by_hand(said, steps):
    config = config_of(CONFIG, [f"evaluate.every={said}", "steps=1000"])
    facts = DurationUnits(batch=16, epoch=200, tokens=7)
    assert convert_durations(config, facts).evaluate.every == steps
    calls = convert_durations(config, facts._replace(steps_per_call=8)).evaluate.every
    assert calls == (steps if said == "40 steps" else math.ceil(steps / 8) * 8)


def test_shares_inside_a_schedule_are_of_its_own_length():
    cosine = "optimizer.schedule={kind: cosine, steps: 40 steps, warmup: 10%}"
    config = config_of(CONFIG, ["steps=100", "evaluate.every=10%", cosine])
    found = convert_durations(config, DurationUnits(batch=16))
    assert (found.optimizer.schedule.steps, found.optimizer.schedule.warmup) == (40, 4)
    assert found.evaluate.every == 10
    assert list(find_own_steps(config)) == ["optimizer.schedule"]
    piece = "{steps: 50%, schedule: {kind: linear, warmup: 20%}}"
    join = f"optimizer.schedule={{kind: join, steps: 50%, pieces: [{piece}, {{}}]}}"
    found = convert_durations(
        config_of(CONFIG, ["steps=100", join]), DurationUnits(batch=16)
    ).optimizer.schedule
    assert (found.steps, found.pieces[0].steps) == (50, 25)
    assert found.pieces[0].schedule.warmup == 10  # of the whole schedule, as the pieces are


@pytest.mark.parametrize("said", ["3 epochs", "100 rows", "7 minutes"])
def test_a_schedule_is_as_long_as_a_run_of_the_same_words(said):
    """Check that steps and the length that a schedule keeps round up to whole calls."""
    schedule = f"optimizer.schedule={{kind: cosine, steps: {said}, warmup: 1 steps}}"
    config = config_of(CONFIG, [f"steps={said}", schedule])
    units = DurationUnits(batch=16, epoch=200, steps_per_call=8, seconds=1.7)
    found = convert_durations(config, units)
    assert found.optimizer.schedule.steps == found.steps
    assert found.optimizer.schedule.warmup == 1


@pytest.mark.parametrize("steps", ["2 epochs", "10 seconds"])
def test_an_experiment_is_built_once_whatever_its_durations_are_in(steps: str, monkeypatch):
    study = Path("experiments/quick.py")
    code = study.read_text()
    old = "optimizer=self.optimizer.build(self.steps),"
    assert old in code
    study.write_text(code.replace(old, "optimizer=self.optimizer,"))
    schedule = "optimizer.schedule={kind: cosine, warmup: 10%}"
    config, builds = config_of(CONFIG, [f"steps={steps}", schedule]), []
    build = type(config).build
    counted = lambda self, place: builds.append(1) or build(self, place)
    monkeypatch.setattr(type(config), "build", counted)
    found = set_up(config).resolved
    found = found.count_again(1.0) if found.lengths.provisional else found
    expected = {"2 epochs": 25, "10 seconds": 10}[steps]
    assert (found.config.steps, len(builds)) == (expected, 1)
    updates = found.experiment.transformation.init(found.abstract_state.params)
    assert updates, "an optimizer for that many steps"


@pytest.mark.thorough
def test_a_run_counts_by_its_own_data_and_keeps_what_was_said():
    said = ["steps=1 epoch", "evaluate.every=50%", "checkpoint.every=1 epoch", "log.every=64 rows"]
    said.append("optimizer.schedule={kind: cosine, warmup: 0.2 epochs}")
    parts = set_up(config_of(CONFIG, said))
    config = parts.resolved.config
    assert (config.steps, config.evaluate.every, config.checkpoint.every) == (13, 7, 13)
    assert (config.log.every, config.optimizer.schedule.warmup) == (4, 3)
    outcome = trained(CONFIG, *said)
    assert (outcome.status, outcome.step) == ("done", 13)
    assert list(read_results(outcome.directory.metrics, "valid")) == [7, 13]
    assert config_of(outcome.directory.config).steps == "1 epoch"
    assert "steps: 1 epoch is 13 steps" in outcome.directory.log.read_text()
    assert trained(CONFIG, *said).why == "the run had already finished; nothing was trained"


def test_an_epoch_that_drops_its_end_is_shorter():
    path = Path("experiments/quick.py")
    dropped = path.read_text().replace("seed=self.seed)", 'seed=self.seed, end="drop")')
    path.write_text(dropped)
    assert set_up(config_of(CONFIG, ["steps=2 epochs"])).resolved.config.steps == 2 * (200 // 16)


def test_numbers_stay_numbers_and_nothing_else_changes():
    config = config_of(CONFIG)
    assert find_durations(config) == {}
    assert convert_durations(config, DurationUnits(16)) is config
    spoken = config_of(CONFIG, ["steps=192 rows"])
    assert dataclasses.replace(convert_durations(spoken, DurationUnits(16)), steps=12) == config


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("steps=3 epocs", "must be 500 or 3 epochs .* found '3 epocs'; did you mean epochs"),
        ("steps=0 minutes", "found '0 minutes'; write more than 0"),
        ("optimizer.schedule.warmup=5 moons", "must be 500 or 3 epochs .* or 10%"),
    ],
)
def test_says_what_it_cannot_be_and_where(setting, words):
    with pytest.raises(ConfigError, match=f"(?s)command line.*{words}"):
        config_of(CONFIG, [setting])


def test_says_what_is_not_known():
    with pytest.raises(ConfigError, match=r"steps: 1M tokens cannot be counted, .*tokens per row"):
        set_up(config_of(CONFIG, ["steps=1M tokens"]))
    with pytest.raises(ConfigError, match="not a multiple of steps_per_call"):
        set_up(config_of(CONFIG, ["steps=3 epochs", "steps_per_call=5", "evaluate.every=7"]))


@pytest.mark.thorough
def test_checkpoints_may_go_by_the_clock():
    config = config_of(CONFIG, ["checkpoint.every=1 minute"])
    saved, now, every = [], [0.0], set_up(config).resolved.config.checkpoint.every
    save = SaveHook(
        every=every, save=lambda step, _: saved.append(step) is None, clock=lambda: now[0]
    )
    save.on_steps(FinishedSteps(range(1, 2), {}, [(1, 0.0)]))
    due = save.next_state(0)
    for step in range(1, 40):
        now[0] += 10  # seconds a step
        if step == due:
            if save.next_state(step - 1) == step:
                save.on_state(step, None)
            due = save.next_state(step)
    assert all(6 <= b - a <= 7 for a, b in itertools.pairwise([0, *saved])), saved
    config = config_of(CONFIG, ["checkpoint.every=10 minutes"])
    assert set_up(config).resolved.config.checkpoint.every == "10 minutes"
    assert trained(CONFIG, "checkpoint.every=10 minutes").status == "done"
