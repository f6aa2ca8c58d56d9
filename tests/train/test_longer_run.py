"""A finished run is extended, and its schedule keeps its length."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from quick_study import at_home, config_of, kept, trained, write_study

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.config.durations import DurationUnits, convert_durations
from jtrain.errors import ConfigError
from jtrain.inspect.debug.find_nan import find_nan
from jtrain.inspect.debug.replay import replay
from jtrain.optim import Cosine
from jtrain.sweep.sweep import sweep
from jtrain.train.hooks.metrics import read_results
from jtrain.train.longer_run import check_rate
from jtrain.train.restore_run import evaluate_run
from jtrain.train.run_result import RunResult

CONFIG = "configs/quick.yaml"
OWN = "runs/quick/config.yaml"
COSINE = "optimizer.schedule={kind: cosine, warmup: 25%}"
OWN_COSINE = "optimizer.schedule={kind: cosine, warmup: 25%, steps: 12}"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, compiled: Path):
    """Return the result of a run that had this length from the start."""
    found = {}

    def come_to(*settings: str) -> dict[str, bytes]:
        if settings not in found:
            with pytest.MonkeyPatch.context() as patch:
                place = tmp_path_factory.mktemp("unbroken")
                write_study(place)
                at_home(place, patch, compiled)
                found[settings] = kept(trained(CONFIG, *settings))
        return found[settings]

    return come_to


class At(jt.Hook):
    """Stops a run after a step, or cuts it off as a power cut does."""

    def __init__(self, step: int, *, cuts: bool = False):
        self.every, self._cuts = step, cuts

    def on_state(self, step, state, metrics):
        if step == self.every and self._cuts:
            raise PowerCutError
        return jt.Stop("a pause") if step == self.every else None


class PowerCutError(BaseException):
    """Ends a run where it stands."""


def log_of(outcome: RunResult) -> str:
    return outcome.directory.log.read_text()


def rates(config: str, *settings: str) -> list[float]:
    """Return the learning rate of each step."""
    values = convert_durations(config_of(config, settings), DurationUnits(batch=16))
    rate = values.optimizer.learning_rate(values.steps)
    return [rate(step) for step in range(values.steps)]


@pytest.mark.thorough
def test_an_extended_run_ends_as_a_longer_one(unbroken):
    assert trained(CONFIG).step == 12
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
    assert (
        "optimizer.schedule keeps the 12 steps that it was made for: after them the learning rate "
        "stays 0.0030. optimizer.schedule.steps=100% stretches it over the run"
    ) in log_of(outcome).splitlines()
    assert evaluate_run(config_of(OWN), Path("runs/quick"))[0] == 18


@pytest.mark.thorough
def test_a_schedule_is_stretched_where_that_is_said_and_each_step_has_its_values():
    trained(CONFIG, COSINE, "checkpoint.keep=9")
    outcome = trained(OWN, "steps=18", "optimizer.schedule.steps=100%")
    assert rates(CONFIG, COSINE, "steps=18") == rates(OWN, "optimizer.schedule.steps=18")
    line = "optimizer.schedule is stretched from 12 to 18 steps: the learning rate of step 13 is "
    assert f"{line}{rates(OWN)[12]:.4f}" in log_of(outcome).splitlines()
    quiet = lambda line: None
    for step in (8, 13):
        found = replay(config_of(OWN), Path("runs/quick"), step, deep=False, log=quiet)
        assert found.compared > 0
        assert (step, found.other) == (step, None)
    shutil.rmtree("runs/quick/checkpoints/12")
    with pytest.raises(ConfigError, match=r"step 13 .*checkpoint 10.*step 12.*--step 12"):
        replay(config_of(OWN), Path("runs/quick"), 13, deep=False, log=quiet)
    longer = trained(CONFIG, COSINE, "steps=20", "checkpoint.keep=9")
    assert longer.step == 20
    assert config_of(OWN).optimizer.schedule.steps == "100%", "what is stretched stays so"


@pytest.mark.thorough
def test_an_unfinished_run_is_made_longer_or_shorter(unbroken):
    trained(CONFIG, hooks=[At(7)])
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
            trained(OWN, "steps=18", hooks=[At(14, cuts=True)])
    assert evaluate_run(config_of(OWN), Path("runs/quick"))[0] == 12, "nothing longer was saved yet"
    assert find_nan(config_of(OWN), log=lambda line: None) is None
    outcome = trained(OWN)
    assert (outcome.step, kept(outcome)) == (18, unbroken("steps=18", OWN_COSINE))


@pytest.mark.thorough
def test_steps_of_a_checkpoint_that_was_lost_are_taken_under_the_new_length():
    trained(CONFIG, COSINE)
    damaged = next(p for p in Path("runs/quick/checkpoints/12").rglob("d/*") if p.is_file())
    damaged.write_bytes(b"another")
    outcome = trained(OWN, "steps=18", "optimizer.schedule.steps=18", "checkpoint.keep=9")
    with CheckpointManager(outcome.directory.checkpoints) as checkpoints:
        assert [change["step"] for change in checkpoints.about(18)["extended"]] == [10]
    found = replay(config_of(OWN), Path("runs/quick"), 12, deep=False, log=lambda line: None)
    assert found.other is None


def test_fewer_steps_than_were_taken_are_refused():
    trained(CONFIG)
    before = Path(OWN).read_bytes()
    with pytest.raises(
        ConfigError, match=r"taken 12 steps already, but steps=8 was.*name=quick-2"
    ) as told:
        trained(CONFIG, "steps=8")
    assert "steps=12 or more" in str(told.value)
    assert Path(OWN).read_bytes() == before
    assert trained(CONFIG).why == "the run had already finished; nothing was trained"


@pytest.mark.thorough
def test_steps_at_a_rate_of_nothing_are_refused():
    linear = "optimizer.schedule={kind: linear}"
    trained(CONFIG, linear)
    with pytest.raises(
        ConfigError, match=r"made for 12 steps and ends at .*0.* would change"
    ) as no:
        trained(CONFIG, linear, "steps=18")
    advised = str(no.value).rpartition(": ")[2]
    assert trained(OWN, "steps=18", advised).step == 18


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ("{kind: linear, steps: 9}", True),
        ("{kind: wsd, steps: 9}", True),
        ("{kind: restarts, cycles: 2, steps: 9}", True),
        ("{kind: cosine, final: 0, steps: 9}", True),
        ("{kind: cosine, steps: 9}", False),
        ("{kind: linear, steps: 12}", False),
        ("{kind: linear}", False),
        ("{kind: one_cycle, steps: 9}", False),
        ("{kind: join, steps: 9, pieces: [{schedule: {kind: linear}}]}", True),
    ],
)
def test_only_a_rate_of_nothing_is_refused(schedule: str, refused: bool):
    config = config_of(CONFIG, [f"optimizer.schedule={schedule}"])
    with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
        check_rate(config)


PATIENT = ("evaluate.every=2", "checkpoint.best=loss", "evaluate.patience=2", "optimizer.lr=3")


@pytest.mark.thorough
def test_a_run_that_was_stopped_early_has_its_patience_anew():
    outcome = trained(CONFIG, *PATIENT)
    first = outcome.step
    assert first < 12
    assert "no better in 2 evaluations" in outcome.why
    longer = trained(OWN, "steps=40")
    assert longer.step >= first + 4
    assert longer.status == "done"
    assert trained(OWN).why == "the run had already finished; nothing was trained"
    # What it came to is what a run without patience has after so many steps.
    free = trained(CONFIG, *PATIENT[:2], PATIENT[3], "name=free", f"steps={longer.step}")
    found = read_results(free.directory.metrics, "valid")
    assert found == read_results(longer.directory.metrics, "valid")
    assert longer.step < 20
    patient = trained(OWN, "evaluate.patience=6")  # another way to go on
    assert patient.step > longer.step


@pytest.mark.thorough
def test_a_run_in_epochs_is_made_longer_in_epochs():
    schedule = "optimizer.schedule={kind: cosine}"
    trained(CONFIG, "steps=1 epoch", schedule, "evaluate.every=0", "checkpoint.every=0")
    outcome = trained(OWN, "steps=1.5 epochs")
    assert outcome.step == 19
    assert config_of(OWN).optimizer.schedule.steps == "1 epoch"
    assert any("optimizer.schedule keeps the 13 steps" in x for x in log_of(outcome).splitlines())


@pytest.mark.thorough
def test_a_run_of_several_steps_a_call_is_made_longer(unbroken):
    calls = ("steps_per_call=5", "evaluate.every=10", "checkpoint.every=5")
    trained(CONFIG, "steps=10", *calls)
    assert kept(trained(OWN, "steps=20")) == unbroken("steps=20", *calls)


@pytest.mark.thorough
def test_fit_is_made_longer_by_the_same_call():
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    loss = lambda p, batch, rng: jt.Mean.of((batch["x"] @ p["w"]) ** 2, batch["mask"])
    params = {"w": np.ones(3, np.float32)}

    def fitted(steps: int, name: str, schedule):
        more = {"lr": 1e-2, "schedule": schedule, "quiet": True}
        return jt.fit(loss, params, x, steps=steps, name=name, **more)

    assert fitted(10, "mine", "cosine").step == 10
    longer = fitted(16, "mine", "cosine")
    assert longer.step == 16
    assert [*longer.history["loss"]] == [*range(1, 17)]
    assert fitted(16, "mine", "cosine").why == "the run had already finished; nothing was trained"
    alone = fitted(16, "alone", Cosine(steps=10))
    np.testing.assert_array_equal(longer.params["w"], alone.params["w"])
    with pytest.raises(ConfigError, match="has taken 16 steps"):
        fitted(12, "mine", "cosine")


@pytest.mark.slow
def test_a_sweep_is_made_longer_by_the_same_command():
    said: list[str] = []
    asked = ["seed=0,1", "name=both"]
    ask = lambda steps: sweep(Path(CONFIG), [*asked, f"steps={steps}"], tell=said.append)
    assert [score.step for score in ask(12).scores] == [12, 12]
    ask(12)
    assert "both: 2 runs, 2 of them earlier; 1 at a time" in said
    assert [score.step for score in ask(18).scores] == [18, 18]
    with pytest.raises(ConfigError, match="batch: 16 there, 8 here"):
        sweep(Path(CONFIG), ["seed=0,1", "batch=8", "name=both"], tell=said.append)
    stands = json.loads(Path("runs/both/seed=0/run.json").read_text())
    assert (stands["status"], stands["step"]) == ("done", 18)


def test_a_longer_run_says_that_the_last_checkpoint_is_missing():
    assert trained(CONFIG).step == 12
    shutil.rmtree("runs/quick/checkpoints/12")
    log = log_of(trained(OWN, "steps=14"))
    assert "checkpoint 12, which runs/quick/run.json names, is missing" in log
    assert "resumes from step 10 of 14" in log
