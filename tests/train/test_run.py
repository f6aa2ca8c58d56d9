"""A run writes its files, and resumes to the same bits whatever stops it."""

import importlib
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from comparison import assert_close
from plain_environ import run_and_kill
from quick_study import SLOW, At, PowerCutError, at_home, config_of, cut, kept, trained, write_study

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.errors import CheckpointError, ConfigError, DamagedError
from jtrain.io.jsonl import read_rows
from jtrain.train.hooks.log import read_results as measured
from jtrain.train.run_dir import RunDir
from jtrain.train.run_result import RunResult
from jtrain.train.run_store import DirectoryStore

SPINE = importlib.import_module("jtrain.train.run")
CONFIG = "configs/quick.yaml"
CALLS = ("steps=15", "steps_per_call=5", "evaluate.every=10")


def stands_of(path: str) -> dict:
    return json.loads((Path(path) / "run.json").read_text())


# What a run leaves.


def test_leaves_the_files_that_it_names(finished: RunResult):
    assert (finished.status, finished.step, finished.why) == ("done", 12, "")
    directory = finished.directory
    assert str(directory.path) == "runs/quick"
    assert {path.name for path in directory.path.iterdir()} == {
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "speed.jsonl",
        "time.jsonl",
        "steps.jsonl",
        "log.txt",
        "checkpoints",
    }
    assert config_of(directory.config) == config_of(CONFIG)
    said = stands_of("runs/quick")
    assert (said["status"], said["step"]) == ("done", 12)
    assert (said["devices"], said["layout"], said["shards"]) == (["cpu:0 cpu"], {}, 1)
    assert said["packages"]["jax"] == __import__("jax").__version__
    log = directory.log.read_text()
    assert "quick: 48 parameters, single over 1 cpu device, 16 rows a step in 1 shard, 1 " in log
    assert "step 12/12" in log
    with CheckpointManager(directory.checkpoints) as checkpoints:
        assert checkpoints.steps() == [10, 12]  # the newest two
        about = checkpoints.about(12)
    assert about["valid"] == finished.results[12]
    assert about["config"]["steps"] == 12


def test_each_step_has_one_row_and_each_evaluation_another(finished: RunResult):
    rows = read_rows(finished.directory.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6, *range(7, 13), 12]
    assert finished.results == measured(finished.directory.metrics, "valid")
    assert [*finished.results] == [6, 12]
    assert finished.results[12]["rows"] == 50  # all of them, none twice


def test_a_finished_run_is_not_run_again(finished: RunResult, monkeypatch):
    files = {p: p.read_bytes() for p in finished.directory.path.rglob("*") if p.is_file()}
    computes = lambda _: pytest.fail("it computes")
    monkeypatch.setattr(SPINE, "resolve_with_step_time", computes)
    again = trained(CONFIG)
    assert (again.status, again.step) == ("done", 12)
    assert again.why == "the run had already finished; nothing was trained"
    assert again.results == finished.results
    assert {p: p.read_bytes() for p in finished.directory.path.rglob("*") if p.is_file()} == files


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_a_hook_may_finish_a_run_and_run_json_names_only_steps_that_are_sealed(monkeypatch):
    said, say = [], RunDir.write_status

    def write(directory, status, **facts):
        said.append((facts["step"], CheckpointManager(directory.checkpoints).newest() or 0))
        say(directory, status, **facts)

    monkeypatch.setattr(RunDir, "write_status", write)
    outcome = trained(CONFIG, hooks=[At(7, lambda: jt.Stop("good enough", "finished"))])
    assert (outcome.status, outcome.step, outcome.why) == ("done", 7, "good enough")
    assert [*outcome.results] == [6, 7]
    assert said == [(0, 0), (5, 5), (7, 7), (7, 7)]
    assert trained(CONFIG).why == "the run had already finished; nothing was trained"


# Stopped and gone on with.


@pytest.fixture(scope="module")
def cut_home(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Path:
    """Return a home whose run was cut off at step 11, with checkpoints of steps 5 and 10."""
    home = tmp_path_factory.mktemp("cut")
    write_study(home)
    with pytest.MonkeyPatch.context() as patch:
        at_home(home, patch, compiled)
        with pytest.raises(PowerCutError):
            trained(CONFIG, hooks=[At(11, cut)])
    return home


@pytest.fixture
def cut_run(cut_home: Path, tmp_path: Path, monkeypatch, compiled: Path) -> Path:
    """Work in a copy of it, and return the folder of its checkpoints."""
    shutil.copytree(cut_home, tmp_path / "home")
    at_home(tmp_path / "home", monkeypatch, compiled)
    return Path("runs/quick/checkpoints")


def damage(checkpoint: Path) -> Path:
    """Flip a bit of a file."""
    path = next(path for path in checkpoint.rglob("d/*") if path.stat().st_size > 200)
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    return path


def test_cut_off_it_resumes_to_the_same_bits(cut_run: Path, unbroken):
    assert kept(trained(CONFIG)) == unbroken()


def test_resumes_from_the_newest_valid_checkpoint_to_the_same_bits(cut_run: Path, unbroken):
    assert sorted(path.name for path in cut_run.iterdir() if path.is_dir()) == ["10", "5"]
    path = damage(cut_run / "10")
    outcome = trained(CONFIG)
    log = outcome.directory.log.read_text()
    assert log.count("checkpoint 10 is damaged and was set aside as") == 1
    assert f"{path.name}: its digest is" in log
    assert "resumes from step 5 of 12" in log
    assert (cut_run / "10.damaged").is_dir()
    assert kept(outcome) == unbroken()


def test_asked_to_stop_at_a_damaged_checkpoint_it_touches_nothing_and_says_how_to_resume(cut_run):
    path, before = damage(cut_run / "10"), sorted(cut_run.iterdir())
    with pytest.raises(DamagedError) as refusal:
        trained(CONFIG, "checkpoint.on_damage=stop")
    told = str(refusal.value)
    assert f"{path.name}: its digest is" in told
    assert sorted(cut_run.iterdir()) == before
    assert told.rpartition("the same command with ")[2] == "checkpoint.on_damage=fall_back"


@pytest.mark.thorough
def test_a_finished_run_whose_last_checkpoint_is_lost_comes_to_it_again(finished_copy, unbroken):
    there = finished_copy.directory
    log = len(there.log.read_text())
    damage(there.checkpoints / "12")
    outcome = trained(CONFIG)
    assert (outcome.status, outcome.step, outcome.why) == ("done", 12, "")
    told = there.log.read_text()[log:]
    assert "checkpoint 12 is damaged and was set aside" in told
    assert "resumes from step 10 of 12" in told
    assert kept(outcome) == unbroken()


def test_a_run_that_says_done_too_early_is_not_believed(cut_run: Path):
    file = cut_run.parent / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "done", "why": ""}))
    outcome = trained(CONFIG)
    assert (outcome.status, outcome.step) == ("done", 12)
    assert "resumes from step 10 of 12" in outcome.directory.log.read_text()


@pytest.mark.parametrize(
    ("number", "why", "settings"),
    [
        (signal.SIGTERM, "asked to end (SIGTERM)", CALLS),
        pytest.param(
            signal.SIGINT,
            "interrupted (Ctrl-C)",
            ("steps=15", "evaluate.every=10"),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["SIGTERM", "SIGINT"],
)
@pytest.mark.usefixtures("study_home")
def test_asked_to_end_it_saves_and_resumes_to_the_same_bits(number, why, settings, unbroken):
    step, before = 5 if settings is CALLS else 7, signal.getsignal(number)
    ask = lambda: signal.raise_signal(number)
    outcome = trained(CONFIG, *settings, hooks=[At(step, ask)])
    assert (outcome.status, outcome.why) == ("stopped", why)
    assert step <= outcome.step <= step + 5
    assert stands_of("runs/quick")["status"] == "stopped"
    with CheckpointManager(outcome.directory.checkpoints) as checkpoints:
        assert checkpoints.newest() == outcome.step
    again = trained(CONFIG, *settings)
    assert f"resumes from step {outcome.step} of 15" in again.directory.log.read_text()
    assert kept(again) == unbroken(*settings)
    assert signal.getsignal(number) == before
    assert not [t for t in threading.enumerate() if t.name in {"guard", "watchdog"}]


def test_a_signal_before_the_first_step_leaves_the_restored_checkpoint(cut_run: Path, monkeypatch):
    write = DirectoryStore.write_start

    def write_and_signal(*given):
        write(*given)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(DirectoryStore, "write_start", write_and_signal)
    monkeypatch.setattr(CheckpointManager, "save", lambda *_, **__: pytest.fail("it saves"))
    outcome = trained(CONFIG)
    assert (outcome.status, outcome.step, outcome.checkpoint) == ("stopped", 10, 10)
    assert (cut_run / "10").is_dir()


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_killed_it_resumes_to_the_same_bits(unbroken):
    settings = ("steps=500", "checkpoint.every=20", "evaluate.every=100")
    metrics = Path("runs/quick/metrics.jsonl")
    Path("experiments/quick.py").write_text(SLOW)
    Path("slow").touch()
    rows = lambda: metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    run_and_kill(lambda: rows() >= 45, CONFIG, *settings)
    Path("slow").unlink()
    assert kept(trained(CONFIG, *settings)) == unbroken(*settings)


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_a_checkpoint_that_cannot_be_written_is_tried_again_and_ends_the_run(monkeypatch):
    from jtrain.checkpoint import seal

    def full(*_):
        raise OSError(28, "No space left on device")

    steps, saves = [], []
    monkeypatch.setattr(seal, "seal", lambda *_: saves.append(1) or full())

    def after_saves(step, state):
        steps.append(step)
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(60)

    with pytest.raises(CheckpointError, match=r"checkpoint 2\d could not .* No space left"):
        trained(CONFIG, "steps=400", "checkpoint.every=20", "evaluate.every=0", hooks=[after_saves])
    assert 20 <= steps[-1] < 40, "it waits for the next save"
    assert len(saves) == 3
    log = Path("runs/quick/log.txt").read_text()
    assert log.count("could not be written") == 3
    assert log.count("Training continues: the next") == 2
    assert "checkpoint 20 could not be written" in log
    assert "ended by an error: SaveError: " in log.splitlines()[-1]
    said = stands_of("runs/quick")
    assert (said["step"], said["status"]) == (0, "crashed")
    assert "No space left" in said["why"]


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_a_checkpoint_whose_leaves_are_not_what_was_saved_gives_way_in_the_same_start(
    monkeypatch, unbroken
):
    from jtrain.parallel import fingerprint

    trained(CONFIG, hooks=[At(7, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    plain, read = fingerprint.read, []

    def once(begun):
        read.append(plain(begun))
        return read[-1] if len(read) > 1 else dict.fromkeys(read[-1], "0" * 16)

    monkeypatch.setattr(fingerprint, "read", once)
    outcome = trained(CONFIG)
    assert (outcome.directory.checkpoints / "7.damaged").is_dir()
    assert kept(outcome) == unbroken()
    assert "checkpoint 7 is damaged: its files are valid" in outcome.directory.log.read_text()


# What may be otherwise when a run goes on.


@pytest.mark.usefixtures("study_home")
def test_a_run_resumes_under_another_layout(unbroken):
    fsdp = "parallel={kind: fsdp, devices: 2, min_size: 0}"
    stopped = trained(CONFIG, fsdp, hooks=[At(8, lambda: jt.Stop("to be moved"))])
    assert stopped.step == 8
    outcome = trained(CONFIG, "parallel={kind: single}")
    assert "parallel.kind: fsdp -> single" in outcome.directory.log.read_text()
    rows = [json.loads(line) for line in unbroken()["metrics.jsonl"].splitlines()]
    alone = [row["loss"] for row in rows if "loss" in row]
    found = [row["loss"] for row in measured(outcome.directory.metrics, "").values()]
    assert_close(found, alone, 1e-4)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("seed=1", "seed: 0 there, 1 here"),
        ("batch=8", "batch: 16 there, 8 here"),
        ("data.rows=99", "data.rows: 200 there, 99 here"),
    ],
)
@pytest.mark.usefixtures("study_home")
def test_values_that_change_results_are_refused_with_the_commands_to_type(setting: str, told: str):
    directory = Path("runs/quick")
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(Path(CONFIG).read_text() + "name: quick\n")
    (directory / "run.json").write_text('{"status": "stopped", "step": 3}')
    before = (directory / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as refusal:
        jt.run(config_of(CONFIG, [setting]), source=Path(CONFIG))
    words = str(refusal.value)
    assert "runs/quick holds a run with other values" in words
    assert told in words
    assert f"jtrain run {CONFIG} ... name=quick-2" in words
    assert "jtrain run runs/quick/config.yaml" in words
    assert (directory / "config.yaml").read_bytes() == before
