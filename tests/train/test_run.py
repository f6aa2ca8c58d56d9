"""A run writes its files, and resumes to the same bits whatever stops it."""

import functools
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from comparison import assert_close
from quick_study import at_home, config_of, kept, trained, write_study

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.errors import CheckpointError, ConfigError, DamagedError, LossError
from jtrain.train.hooks.metrics import read_metrics
from jtrain.train.hooks.metrics import read_results as measured
from jtrain.train.run_result import RunResult

CONFIG = "configs/quick.yaml"
CALLS = ("steps=15", "steps_per_call=5", "evaluate.every=10")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, compiled: Path):
    """Return the result of an uninterrupted run with these settings."""
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
    """Does something after a step."""

    def __init__(self, step: int, act):
        self.every, self._act = step, act

    def on_state(self, step, state, metrics):
        return self._act() if step == self.every else None


class PowerCutError(BaseException):
    """Ends a run where it stands: no error, which the run would tell of."""


def cut():
    raise PowerCutError


def stands(outcome: RunResult) -> dict:
    return json.loads(outcome.directory.status.read_text())


def stands_of(path: str) -> dict:
    return json.loads((Path(path) / "run.json").read_text())


def steps_of(prefix: str, outcome: RunResult) -> list[int]:
    return list(measured(outcome.directory.metrics, prefix))


def losses(outcome: RunResult) -> list[float]:
    return [row["loss"] for row in measured(outcome.directory.metrics, "").values()]


# What a run leaves.


@pytest.mark.thorough
def test_leaves_the_files_that_it_names():
    outcome = trained(CONFIG)
    assert (outcome.status, outcome.step, outcome.why) == ("done", 12, "")
    directory = outcome.directory
    assert str(directory.path) == "runs/quick"
    assert {path.name for path in directory.path.iterdir()} == {
        "config.yaml", "run.json", "metrics.jsonl", "speed.jsonl", "time.jsonl", "steps.jsonl",
        "compiles.jsonl", "log.txt", "checkpoints"
    }  # fmt: skip
    assert config_of(directory.config) == config_of(CONFIG)
    said = stands(outcome)
    assert (said["status"], said["step"]) == ("done", 12)
    assert (said["devices"], said["layout"], said["shards"]) == (["cpu:0 cpu"], {}, 1)
    assert said["packages"]["jax"] == __import__("jax").__version__
    log = directory.log.read_text()
    assert "quick: 48 parameters, single over 1 cpu device, 16 rows a step in 1 shard, 1 " in log
    assert "step 12/12" in log
    with CheckpointManager(directory.checkpoints) as checkpoints:
        assert checkpoints.steps() == [10, 12]  # the newest two
        about = checkpoints.about(12)
    assert about["valid"] == outcome.results[12]
    assert about["config"]["steps"] == 12


def test_each_step_has_one_row_and_each_evaluation_another():
    outcome = trained(CONFIG)
    rows = read_metrics(outcome.directory.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6, *range(7, 13), 12]
    assert steps_of("", outcome) == list(range(1, 13))
    assert steps_of("valid", outcome) == [6, 12]
    assert outcome.results == measured(outcome.directory.metrics, "valid")
    assert outcome.results[12]["rows"] == 50  # all of them, none twice


def test_the_cadences_are_those_of_the_config():
    outcome = trained(CONFIG, "log.every=4", "evaluate.every=5", "checkpoint.every=0")
    assert steps_of("", outcome) == [4, 8, 12]
    assert steps_of("valid", outcome) == [5, 10, 12]
    with CheckpointManager(outcome.directory.checkpoints) as checkpoints:
        assert checkpoints.steps() == [12]


def test_a_run_shorter_than_the_cadences_says_something_too():
    outcome = trained(CONFIG, "log.every=50", "evaluate.every=0", "checkpoint.every=100")
    assert steps_of("", outcome) == steps_of("valid", outcome) == [12]
    assert "step 12/12" in outcome.directory.log.read_text()


def test_the_best_checkpoint_is_kept_beside_the_newest():
    worst = "highest loss"  # for the lowest is the newest
    settings = ("evaluate.every=4", "checkpoint.every=4", "checkpoint.keep=1")
    outcome = trained(CONFIG, *settings, f"checkpoint.best={worst}")
    found = {step: numbers["loss"] for step, numbers in outcome.results.items()}
    best = max(found, key=found.__getitem__)
    assert best < 12
    with CheckpointManager(outcome.directory.checkpoints, best=worst) as checkpoints:
        assert checkpoints.steps() == [best, 12]
        assert checkpoints.best() == best


@pytest.mark.thorough
def test_the_config_that_it_leaves_runs_from_anywhere_to_the_same_bits(tmp_path, monkeypatch):
    first = trained(CONFIG, "seed=3")
    want, left = kept(first), first.directory.config.absolute()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert kept(trained(left)) == want
    assert (tmp_path / "elsewhere" / "runs" / "quick").is_dir()


@pytest.mark.thorough
def test_a_run_resumes_without_an_experiment_in_a_folder_above(
    tmp_path_factory, monkeypatch, unbroken
):
    config = Path(CONFIG).absolute()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    trained(config, hooks=[At(5, lambda: jt.Stop("a pause"))])
    outcome = trained(config)
    assert outcome.status == "done"
    assert kept(outcome, config) == unbroken()


def test_the_same_twice_is_bitwise_the_same(unbroken):
    assert kept(trained(CONFIG, "name=again")) == unbroken()
    assert kept(trained(CONFIG, "name=other", "seed=1")) != unbroken()


def test_values_without_a_name_are_called_by_their_experiment():
    config = config_of(CONFIG)
    config = type(config)(**{**vars(config), "name": ""})
    outcome = jt.run(config)
    assert outcome.directory.path == Path("runs/quick")
    assert config_of(outcome.directory.config) == config_of(CONFIG)


def test_a_finished_run_is_not_run_again(monkeypatch):
    outcome = trained(CONFIG)
    files = {p: p.read_bytes() for p in outcome.directory.path.rglob("*") if p.is_file()}
    computes = lambda _: pytest.fail("it computes")
    monkeypatch.setattr(sys.modules["jtrain.train.train_to_end"], "set_up_with_step_time", computes)
    again = trained(CONFIG)
    assert (again.status, again.step, again.why) == (
        "done",
        12,
        "the run had already finished; nothing was trained",
    )
    assert again.results == outcome.results
    assert {p: p.read_bytes() for p in outcome.directory.path.rglob("*") if p.is_file()} == files


def test_a_hook_may_finish_a_run():
    outcome = trained(CONFIG, hooks=[At(7, lambda: jt.Stop("good enough", "finished"))])
    assert (outcome.status, outcome.step, outcome.why) == ("done", 7, "good enough")
    assert list(outcome.results) == [6, 7]
    assert trained(CONFIG).why == "the run had already finished; nothing was trained"


# Stopped and gone on with.


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 5, 9, 12])
def test_cut_off_after_any_step_it_resumes_to_the_same_bits(step: int, unbroken):
    with pytest.raises(PowerCutError):
        trained(CONFIG, hooks=[At(step, cut)])
    assert kept(trained(CONFIG)) == unbroken()


@pytest.mark.thorough
def test_cut_off_twice_with_several_steps_a_call(unbroken):
    for step in (5, 10):
        with pytest.raises(PowerCutError):
            trained(CONFIG, *CALLS, hooks=[At(step, cut)])
    outcome = trained(CONFIG, *CALLS)
    assert steps_of("", outcome) == list(range(1, 16))
    assert kept(outcome) == unbroken(*CALLS)
    single = unbroken("steps=15", "evaluate.every=10")
    rows = [json.loads(line) for line in single["metrics.jsonl"].splitlines()]
    alone = [row["loss"] for row in rows if "loss" in row]
    assert_close(losses(outcome), alone, 1e-5)  # two programs, one loss


@pytest.mark.thorough
def test_cut_off_after_its_last_checkpoint_it_only_says_that_it_is_done(monkeypatch, unbroken):
    from jtrain.train.run_dir import RunDir

    say = RunDir.write_status
    with monkeypatch.context() as patch:
        patch.setattr(
            RunDir, "write_status", lambda d, s, **f: cut() if s == "done" else say(d, s, **f)
        )
        with pytest.raises(PowerCutError):
            trained(CONFIG)
    outcome = trained(CONFIG)
    assert outcome.status == "done"
    assert kept(outcome) == unbroken()


def damage(checkpoint: Path) -> Path:
    """Flip a bit of a file."""
    path = next(path for path in checkpoint.rglob("d/*") if path.stat().st_size > 200)
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    return path


def test_resumes_from_the_newest_valid_checkpoint_to_the_same_bits(unbroken):
    with pytest.raises(PowerCutError):
        trained(CONFIG, hooks=[At(11, cut)])
    kept_here = Path("runs/quick/checkpoints")
    assert sorted(path.name for path in kept_here.iterdir()) == ["10", "5"]
    path = damage(kept_here / "10")
    outcome = trained(CONFIG)
    log = outcome.directory.log.read_text()
    assert log.count("checkpoint 10 is damaged and was set aside as") == 1
    assert f"{path.name}: its digest is" in log
    assert "resumes from step 5 of 12" in log
    assert (kept_here / "10.damaged").is_dir()
    assert kept(outcome) == unbroken()


@pytest.mark.thorough
def test_asked_to_stop_at_a_damaged_checkpoint_it_touches_nothing_and_says_how_to_resume(unbroken):
    with pytest.raises(PowerCutError):
        trained(CONFIG, hooks=[At(11, cut)])
    kept_here = Path("runs/quick/checkpoints")
    path = damage(kept_here / "10")
    with pytest.raises(DamagedError) as refusal:
        trained(CONFIG, "checkpoint.on_damage=stop")
    told = str(refusal.value)
    assert "checkpoint 10 in " in told
    assert f"{path.name}: its digest is" in told
    assert sorted(path.name for path in kept_here.iterdir()) == ["10", "5"]
    advised = told.rpartition("the same command with ")[2]
    outcome = trained(CONFIG, advised)
    assert "resumes from step 5 of 12" in outcome.directory.log.read_text()
    assert kept(outcome) == unbroken()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lose", "from_step"),
    [
        pytest.param(
            lambda there: damage(there / "12"), "resumes from step 10 of 12", id="damaged"
        ),
        pytest.param(
            lambda there: shutil.rmtree(there / "12"),
            "resumes from step 10 of 12",
            id="gone",
            marks=pytest.mark.slow,
        ),
        pytest.param(shutil.rmtree, "", id="all gone", marks=pytest.mark.slow),
    ],
)
def test_a_finished_run_whose_last_checkpoint_is_lost_comes_to_it_again(lose, from_step, unbroken):
    there = trained(CONFIG).directory
    log = len(there.log.read_text())
    lose(there.checkpoints)
    outcome = trained(CONFIG)
    assert (outcome.status, outcome.step, outcome.why) == ("done", 12, "")
    told = there.log.read_text()[log:]
    assert "was done at step 12, of which the checkpoint is damaged or missing" in told
    assert from_step in told
    assert kept(outcome) == unbroken()
    assert trained(CONFIG).why == "the run had already finished; nothing was trained"


def test_run_json_names_only_steps_that_are_sealed(monkeypatch):
    from jtrain.train.run_dir import RunDir

    said, say = [], RunDir.write_status

    def watched(directory, status, **facts):
        said.append((facts["step"], CheckpointManager(directory.checkpoints).newest() or 0))
        say(directory, status, **facts)

    monkeypatch.setattr(RunDir, "write_status", watched)
    trained(CONFIG)
    assert said == [(0, 0), (5, 5), (10, 10), (12, 12), (12, 12)]


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


def test_an_error_leaves_its_word_and_the_same_command_resumes(unbroken):
    def fails():
        raise KeyError("loss/typo")

    with pytest.raises(KeyError):
        trained(CONFIG, hooks=[At(7, fails)])
    said = stands_of("runs/quick")
    assert (said["status"], said["why"]) == ("crashed", "KeyError: 'loss/typo'")
    last = Path("runs/quick/log.txt").read_text().splitlines()[-1]
    assert last == "ended by an error: KeyError: 'loss/typo'"
    whys = []
    note = lambda: whys.append(stands_of("runs/quick")["why"])
    outcome = trained(CONFIG, hooks=[At(9, note)])
    assert whys == [""], "nothing of the life before"
    assert kept(outcome) == unbroken()
    assert (stands(outcome)["status"], stands(outcome)["why"]) == ("done", "")


@pytest.mark.thorough
def test_a_save_that_fails_behind_an_error_is_told_too(monkeypatch, capfd):
    from jtrain.checkpoint import seal

    failed = threading.Event()

    def late(*_):
        failed.wait(60)
        raise OSError(28, "No space left on device")

    def fails():
        failed.set()
        raise KeyError("loss/typo")

    monkeypatch.setattr(seal, "seal", late)
    with pytest.raises(KeyError):
        jt.run(config_of(CONFIG), hooks=[At(6, fails)])
    told = "and a save has failed: checkpoint 5 could not be written"
    assert told in Path("runs/quick/log.txt").read_text()
    assert told in capfd.readouterr().out
    assert stands_of("runs/quick")["why"] == "KeyError: 'loss/typo'"


def test_the_status_is_on_the_disk_before_waiting_for_trackers(monkeypatch):
    from jtrain.train.run_hooks import RunHooks

    seen = []
    look = lambda watch, status: seen.append((status, stands_of("runs/quick")["status"]))
    monkeypatch.setattr(RunHooks, "end_tracking", look)
    assert jt.run(config_of(CONFIG)).status == "done"
    assert seen == [("done", "done")]


@pytest.mark.thorough
@pytest.mark.parametrize(("slow", "phase"), [("compile_step", "compile"), ("fresh", "restore")])
def test_a_run_that_takes_long_to_begin_says_what_it_does(
    monkeypatch, capfd, slow: str, phase: str
):
    from jtrain.distributed.heartbeat import HEARTBEAT
    from jtrain.distributed.heartbeat.startup_progress import DOING, StartupProgress
    from jtrain.train.setup import TrainSetup

    does = getattr(TrainSetup, slow)

    def slowly(parts: TrainSetup, **options: object) -> object:
        while HEARTBEAT.now().phase != phase:  # the state is made beside the compilation
            time.sleep(0.01)
        time.sleep(1.0)
        return does(parts, **options)

    monkeypatch.setattr(TrainSetup, slow, slowly)
    soon = functools.partial(StartupProgress, first=0.3, tick=0.05)
    spine = importlib.import_module("jtrain.train.train_to_end")
    monkeypatch.setattr(spine, "StartupProgress", soon)
    jt.run(config_of(CONFIG))
    assert f"{DOING[phase]}: " in capfd.readouterr().out


@pytest.mark.thorough
def test_a_checkpoint_whose_leaves_are_not_what_was_saved_gives_way_in_the_same_start(
    monkeypatch, unbroken
):
    from jtrain.checkpoint import fingerprint

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


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGTERM, "asked to end (SIGTERM)"),
        pytest.param(signal.SIGINT, "interrupted (Ctrl-C)", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [pytest.param(("steps=15", "evaluate.every=10"), marks=pytest.mark.thorough), CALLS],
    ids=["1", "5"],
)
def test_asked_to_end_it_saves_and_resumes_to_the_same_bits(number, why, settings, unbroken):
    step = 5 if settings is CALLS else 7
    ask = lambda: os.kill(os.getpid(), number)
    outcome = trained(CONFIG, *settings, hooks=[At(step, ask)])
    assert (outcome.status, outcome.why) == ("stopped", why)
    assert step <= outcome.step <= step + 5
    assert stands(outcome)["status"] == "stopped"
    with CheckpointManager(outcome.directory.checkpoints) as checkpoints:
        assert checkpoints.newest() == outcome.step
    again = trained(CONFIG, *settings)
    assert f"resumes from step {outcome.step} of 15" in again.directory.log.read_text()
    assert kept(again) == unbroken(*settings)


@pytest.mark.thorough
def test_killed_at_random_it_resumes_to_the_same_bits(unbroken):
    settings = ("steps=500", "checkpoint.every=20", "evaluate.every=100")
    study = Path("experiments/quick.py")
    slow = "train=Slow(train, size"
    study.write_text(f"{study.read_text().replace('train=Shuffled(train, size', slow)}{SLOW}")
    assert slow in study.read_text()
    draw, metrics, most = random.Random(0), Path("runs/quick/metrics.jsonl"), 0
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        most += draw.randint(60, 140)
        command = [sys.executable, "-m", "jtrain", "run", CONFIG, *settings]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            while run.poll() is None and _newest(metrics) < most:
                time.sleep(0.002)
            run.send_signal(number)
            told = run.communicate(timeout=300)[1].decode()
        finally:
            run.kill()
        assert run.returncode == (75 if number == signal.SIGINT else -number), told
    assert kept(trained(CONFIG, *settings)) == unbroken(*settings)


SLOW = '''
import time


class Slow(Shuffled):
    """Takes its time, so that a kill finds it running."""

    def __getitem__(self, step, /):
        time.sleep(0.003)
        return super().__getitem__(step)
'''


def _newest(metrics: Path) -> int:
    """Return the newest step that has a row."""
    if not metrics.exists():
        return 0
    found = re.findall(rb'"step": (\d+),', metrics.read_bytes()[-2000:])
    return int(found[-1]) if found else 0


# What may be otherwise when a run goes on.


MIRRORED = "parallel={kind: mirrored, devices: 4}"
FSDP, SINGLE = "parallel={kind: fsdp, devices: 8, min_size: 0}", "parallel={kind: single}"


@pytest.mark.parametrize(
    ("layouts", "changes"),
    [
        ((FSDP, SINGLE), ["parallel.kind: fsdp -> single"]),
        pytest.param(
            (MIRRORED, FSDP, SINGLE),
            [
                "parallel.kind: mirrored -> fsdp",
                "parallel.devices: 4 -> 8",
                "parallel.kind: fsdp -> single",
            ],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["once", "twice"],
)
def test_a_run_resumes_under_another_layout(layouts, changes, unbroken):
    stops = range(16 - 4 * len(layouts), 13, 4)
    stop = lambda: jt.Stop("to be moved")
    outcomes = [
        trained(CONFIG, layout, hooks=[At(step, stop)])
        for layout, step in zip(layouts, stops, strict=True)
    ]
    assert [outcome.step for outcome in outcomes] == [*stops]
    outcome = outcomes[-1]
    log = outcome.directory.log.read_text()
    assert all(change in log for change in changes)
    rows = [json.loads(line) for line in unbroken()["metrics.jsonl"].splitlines()]
    alone = [row["loss"] for row in rows if "loss" in row]
    assert_close(losses(outcome), alone, 1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("checkpoint.keep=3", "checkpoint.keep: 2 -> 3"),
        ("evaluate.every=4", "evaluate.every: 6 -> 4"),
        ("log.every=2", "log.every: 1 -> 2"),
        ("microbatches=2", "microbatches: 1 -> 2"),
    ],
)
def test_values_that_change_no_result_may_differ_and_are_reported(setting: str, line: str):
    trained(CONFIG, hooks=[At(5, lambda: jt.Stop("a pause"))])
    outcome = trained(CONFIG, setting)
    assert outcome.status == "done"
    assert line in outcome.directory.log.read_text().splitlines()
    assert config_of(outcome.directory.config) == config_of(CONFIG, [setting])


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("seed=1", "seed: 0 there, 1 here"),
        ("batch=8", "batch: 16 there, 8 here"),
        ("optimizer.lr=1", "optimizer.lr: 0.03 there, 1.0 here"),
        ("model.width=4", "model.width: 8 there, 4 here"),
        ("data.rows=99", "data.rows: 200 there, 99 here"),
    ],
)
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


@pytest.mark.thorough
def test_a_copy_of_a_run_resumes_under_its_own_name(unbroken):
    there = trained(CONFIG, hooks=[At(5, lambda: jt.Stop("a pause"))]).directory
    shutil.copytree(there.path, "runs/copy")
    with pytest.raises(
        ConfigError, match=r"runs/copy holds a copy of quick, a run with"
    ) as refusal:
        trained(CONFIG, "name=copy", "seed=1")
    advised = str(refusal.value).rpartition("or resume that one: jtrain run ")[2].split()
    assert advised == ["runs/copy/config.yaml", "name=copy"]
    outcome = trained(*advised)
    assert str(outcome.directory.path) == "runs/copy"
    assert "name: quick -> copy" in outcome.directory.log.read_text().splitlines()
    assert kept(outcome) == unbroken()
    assert there.facts()["step"] == 5, "where it was copied from nothing has changed"
    assert (
        trained("runs/copy/config.yaml").why == "the run had already finished; nothing was trained"
    )


def test_nothing_asks_for_devices_before_the_layout_has_said_how_many(monkeypatch):
    """Or a CPU is one device, whatever `parallel.devices` says: seen in one run of two."""
    spine, order = sys.modules["jtrain.train.train_to_end"], []
    settled, prepare = spine.set_up_with_step_time, CheckpointManager.prepare

    def settle(*given):
        parts = settled(*given)
        order.append("the layout")
        return parts

    monkeypatch.setattr(spine, "set_up_with_step_time", settle)
    monkeypatch.setattr(
        CheckpointManager, "prepare", lambda self: (order.append("storage"), prepare(self))
    )
    trained(CONFIG)
    assert order == ["the layout", "storage"]


@pytest.mark.thorough
def test_a_run_that_failed_before_its_first_step_keeps_no_name(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jtrain.train.setup.make_step", _refuse)
        with pytest.raises(LossError):
            trained(CONFIG, "seed=1")
    assert not Path("runs/quick/config.yaml").exists()
    assert trained(CONFIG, "seed=2").status == "done"


def _refuse(*_, **__):
    raise LossError("no")
