"""A finished run is extended, its schedule kept; durations in time become steps, measured once."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from quick_study import At, PowerCutError, config_of, cut, kept, trained

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.config.dump import flatten
from jtrain.config.durations import DurationUnits, convert_durations
from jtrain.errors import ConfigError
from jtrain.inspect.debug.replay import replay
from jtrain.train.compile_step import resolve_with_step_time
from jtrain.train.hooks.log import read_results
from jtrain.train.longer_run import check_rate
from jtrain.train.restore import evaluate_run
from jtrain.train.run_result import RunResult

pytestmark = pytest.mark.usefixtures("study_home")
CONFIG = "configs/quick.yaml"
OWN = "runs/quick/config.yaml"
COSINE = "optimizer.schedule={kind: cosine, warmup: 25%}"
OWN_COSINE = "optimizer.schedule={kind: cosine, warmup: 25%, steps: 12}"


def log_of(outcome: RunResult) -> str:
    return outcome.directory.log.read_text()


def rates(config: str, *settings: str) -> list[float]:
    """Return the learning rate of each step."""
    values = convert_durations(config_of(config, settings), DurationUnits(batch=16))
    rate = values.optimizer.learning_rate(values.steps)
    return [rate(step) for step in range(values.steps)]


@pytest.mark.thorough
def test_an_extended_run_ends_as_a_longer_one(finished_copy: RunResult, unbroken):
    assert trained(CONFIG, "steps=15").step == 15
    outcome = trained(OWN, "steps=18")
    assert (outcome.status, outcome.step) == ("done", 18)
    found, whole = kept(outcome), unbroken("steps=18")
    rows = [json.loads(line) for line in found.pop("metrics.jsonl").splitlines()]
    ends = [row for row in rows if row["step"] == 15 and "loss" not in row]
    assert [row for row in rows if row not in ends] == [
        json.loads(line) for line in whole["metrics.jsonl"].splitlines()
    ]
    assert {name: whole[name] for name in found} == found
    assert len(ends) == 1, "each end of the run was evaluated"
    assert list(outcome.results) == [6, 12, 15, 18]
    assert "resumes from step 12 of 15" in log_of(outcome)
    assert "resumes from step 15 of 18" in log_of(outcome)
    assert "steps: 15 -> 18" in log_of(outcome).splitlines()
    assert trained(CONFIG, "steps=18").why == "the run had already finished; nothing was trained"
    assert trained(OWN).why == "the run had already finished; nothing was trained"
    with CheckpointManager(outcome.directory.checkpoints) as checkpoints:
        about = checkpoints.about(18)
    before = {"steps": 12, "optimizer.schedule.steps": 0}
    after = {"steps": 15, "optimizer.schedule.steps": 12}
    assert about["extended"] == [{"step": 12, "before": before}, {"step": 15, "before": after}]


@pytest.mark.thorough
def test_a_schedule_keeps_its_length_unless_another_is_said(unbroken):
    trained(CONFIG, COSINE)
    trained(CONFIG, COSINE, "steps=15")
    outcome = trained(OWN, "steps=18")
    assert config_of(OWN).optimizer.schedule.steps == 12, "of the first run still"
    assert rates(OWN)[:12] == rates(CONFIG, COSINE)
    assert set(rates(OWN)[12:]) == {rates(CONFIG, COSINE)[-1]}
    found, whole = kept(outcome), unbroken("steps=18", OWN_COSINE)
    assert {**found, "metrics.jsonl": b""} == {**whole, "metrics.jsonl": b""}
    assert "optimizer.schedule.steps=100% stretches it over the run" in log_of(outcome)
    assert evaluate_run(config_of(OWN), Path("runs/quick"))[0] == 18


@pytest.mark.thorough
def test_a_schedule_is_stretched_where_that_is_said_and_each_step_has_its_values():
    trained(CONFIG, COSINE, "checkpoint.keep=9")
    outcome = trained(OWN, "steps=18", "optimizer.schedule.steps=100%")
    assert rates(CONFIG, COSINE, "steps=18") == rates(OWN, "optimizer.schedule.steps=18")
    assert "optimizer.schedule is stretched from 12 to 18 steps" in log_of(outcome)
    quiet = lambda line: None
    for step in (8, 13):
        found = replay(config_of(OWN), Path("runs/quick"), step, log=quiet)
        assert found.compared > 0
        assert (step, found.other) == (step, None)
    shutil.rmtree("runs/quick/checkpoints/12")
    with pytest.raises(ConfigError, match=r"step 13 .*checkpoint 10.*step 12.*--step 12"):
        replay(config_of(OWN), Path("runs/quick"), 13, log=quiet)
    longer = trained(CONFIG, COSINE, "steps=20", "checkpoint.keep=9")
    assert longer.step == 20
    assert config_of(OWN).optimizer.schedule.steps == "100%", "what is stretched stays so"


@pytest.mark.thorough
def test_an_unfinished_run_is_made_longer_or_shorter(unbroken):
    trained(CONFIG, hooks=[At(7, lambda: jt.Stop("a pause"))])
    short = trained(OWN, "steps=9")
    assert (short.status, short.step) == ("done", 9)
    assert config_of(OWN).optimizer.schedule.steps == 12
    outcome = trained(OWN, "steps=18", "optimizer.schedule.steps=12")
    found, whole = kept(outcome), unbroken("steps=18")
    assert {**found, "metrics.jsonl": b""} == {**whole, "metrics.jsonl": b""}


@pytest.mark.thorough
def test_cut_off_before_anything_was_saved_it_resumes_to_the_same_bits(unbroken):
    trained(CONFIG, COSINE)
    for _ in range(2):
        with pytest.raises(PowerCutError):
            trained(OWN, "steps=18", hooks=[At(14, cut)])
    assert evaluate_run(config_of(OWN), Path("runs/quick"))[0] == 12, "nothing longer was saved yet"
    outcome = trained(OWN)
    assert (outcome.step, kept(outcome)) == (18, unbroken("steps=18", OWN_COSINE))


def test_fewer_steps_than_were_taken_are_refused(finished: RunResult):
    before = Path(OWN).read_bytes()
    with pytest.raises(
        ConfigError, match=r"taken 12 steps already, but steps=8 was.*name=quick-2"
    ) as told:
        trained(CONFIG, "steps=8")
    assert "steps=12 or more" in str(told.value)
    assert Path(OWN).read_bytes() == before
    assert trained(CONFIG).why == "the run had already finished; nothing was trained"


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ("{kind: linear, steps: 9}", True),
        ("{kind: cosine, steps: 9}", False),
        ("{kind: linear, steps: 12}", False),
        ("{kind: join, steps: 9, pieces: [{schedule: {kind: linear}}]}", True),
    ],
)
def test_only_a_rate_of_nothing_is_refused(schedule: str, refused: bool):
    config = config_of(CONFIG, [f"optimizer.schedule={schedule}"])
    with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
        check_rate(config)


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


@pytest.mark.thorough
def test_a_killed_run_resumes_with_the_same_numbers(monkeypatch):
    monkeypatch.setattr("jtrain.train.compile_step.seconds_per_step", lambda parts: 0.1)
    with pytest.raises(PowerCutError):
        trained(CONFIG, *IN_TIME, "checkpoint.every=2", hooks=[At(9, cut)])
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
