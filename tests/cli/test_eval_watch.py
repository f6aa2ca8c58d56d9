"""`jtrain eval --watch`: each new checkpoint of a run is evaluated once, beside the training."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import until
from quick_study import SLOW, at_home, trained, write_study

from jtrain.checkpoint import layout
from jtrain.checkpoint.lock import WriteLock
from jtrain.cli import main
from jtrain.train import watch_run
from jtrain.train.run_result import RunResult
from jtrain.train.trackers import TensorBoard, TrackedRun
from jtrain.train.watch_run import NAME, PINS

pytestmark = pytest.mark.thorough

KEEP_ALL = ("checkpoint.every=4", "checkpoint.keep=9")


def rows(run: Path) -> list[dict]:
    """Return the rows of evaluations.jsonl that are complete."""
    path = run / NAME
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def set_status(run: Path, status: str) -> None:
    """Change the status of a run."""
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "status": status}))


@pytest.fixture
def outcome(copy_of, monkeypatch: pytest.MonkeyPatch) -> RunResult:
    """Work beside a finished run with checkpoints 4, 8 and 12."""
    monkeypatch.setattr(watch_run, "POLL", 0.05)
    return copy_of(*KEEP_ALL, "evaluate.every=4")


@pytest.fixture
def run(outcome: RunResult) -> Path:
    return outcome.directory.path


def watch(capfd, *words: str) -> tuple[int, list[dict], str]:
    """Watch the run; return exit code, printed rows and messages."""
    code = main(["eval", "quick", "--watch", "--json", *words])
    out, err = capfd.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def test_each_checkpoint_is_evaluated_once(run: Path, outcome: RunResult, capfd):
    code, printed, err = watch(capfd)
    assert code == 0
    assert "the run is done, and step 12 is evaluated" in err
    assert [row["step"] for row in printed] == [row["step"] for row in rows(run)] == [4, 8, 12]
    for row in printed:
        assert row["valid"] == pytest.approx(outcome.results[row["step"]], rel=1e-6)
    before = (run / NAME).read_bytes()
    code, printed, _ = watch(capfd)
    assert (code, printed, (run / NAME).read_bytes()) == (0, [], before)
    assert not (run / PINS).exists()


def test_trackers_get_each_evaluation_once(run: Path, outcome: RunResult, capfd, monkeypatch):
    rows, ends = [], []

    class Fake:
        id = "of the service"

        def __init__(self, about: TrackedRun):
            self.about = about

        def write(self, step, numbers):
            rows.append((self.about.name, self.about.id, step, dict(numbers)))

        def close(self, end):
            ends.append(end)

    monkeypatch.setattr(TensorBoard, "open", lambda self, about: Fake(about))
    monkeypatch.setattr(TensorBoard, "package", "json")
    config = (run / "config.yaml").read_text()
    assert "trackers: []" in config
    config = config.replace("trackers: []", "trackers: [{kind: tensorboard}]")
    (run / "config.yaml").write_text(config)
    first = json.loads((run / "run.json").read_text())["status"]
    set_status(run, "stopped")
    watch(capfd, "--timeout", "0.1")
    set_status(run, first)
    (run / NAME).unlink()  # so that all are evaluated again
    watch(capfd)
    assert [row[:3] for row in rows] == [("quick-evaluation", "", step) for step in (4, 8, 12)]
    for _, _, step, numbers in rows:
        assert numbers["valid/loss"] == pytest.approx(outcome.results[step]["loss"], rel=1e-6)
    assert ends == ["stopped", "done"]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_pinned(run: Path, capfd, monkeypatch):
    """Retention of the training process removes each checkpoint once it is chosen."""
    plain = watch_run._evaluate

    def evaluate(setup, run_dir, step, log):
        layout.delete_checkpoint(run_dir.checkpoints, step)
        return plain(setup, run_dir, step, log)

    monkeypatch.setattr(watch_run, "_evaluate", evaluate)
    code, printed, _ = watch(capfd)
    assert (code, [row["step"] for row in printed]) == (0, [4, 8, 12])
    assert layout.list_named_steps(run / "checkpoints") == []


def save_again(run: Path, step: int) -> None:
    """Save other weights as the checkpoint of a step, as a run does after a rollback."""
    later, directory = layout.read_record(run / "checkpoints", 12), run / "checkpoints"
    written = layout.create_saving_path(directory, step)
    shutil.copytree(directory / "12" / layout.STATE, written / layout.STATE)
    id = json.loads((run / "run.json").read_text())["id"]
    layout.commit(written, {**later, "step": step, "fingerprints": {}}, id)


def test_a_step_that_is_saved_again_is_evaluated_again(run: Path, capfd):
    assert watch(capfd)[0] == 0
    before = {row["step"]: row["valid/loss"] for row in rows(run)}
    layout.delete_checkpoint(run / "checkpoints", 8)
    save_again(run, 8)
    code, printed, _ = watch(capfd)
    assert (code, [row["step"] for row in printed]) == (0, [8])
    after = {row["step"]: row["valid/loss"] for row in rows(run)}
    assert len(rows(run)) == 3, "the row of the removed weights is replaced"
    assert after == {4: before[4], 8: before[12], 12: before[12]}
    assert watch(capfd)[:2] == (0, [])


def test_a_damaged_checkpoint_is_skipped_and_a_damaged_last_one_is_a_fault(run: Path, capfd):
    for step in (8, 12):
        path = next(Path(f"runs/quick/checkpoints/{step}").rglob("d/*"))
        path.write_bytes(path.read_bytes()[::-1])
    code, printed, err = watch(capfd)
    assert (code, [row["step"] for row in printed]) == (70, [4])
    assert "checkpoint 8 is damaged" in err
    assert "its last checkpoint (12) cannot be evaluated" in err


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        ("running", 70, "nothing of the run has changed for 0.3 s, though its status is running"),
        ("stopped", 75, "the run is stopped, and was not resumed within 0.3 s"),
        ("failed", 0, "the run is failed, and step 12 is evaluated"),
    ],
)
def test_a_run_that_ends_otherwise_ends_the_watch(run: Path, capfd, status, code, says):
    set_status(run, status)
    found, printed, err = watch(capfd, "--timeout", "0.3")
    assert (found, [row["step"] for row in printed]) == (code, [4, 8, 12])
    assert says in err
    if code:
        assert "To go on: jtrain run runs/quick/config.yaml" in err


def test_two_watches_do_not_evaluate_the_same_run(run: Path, capfd):
    lock = WriteLock(run / PINS)
    code, _, err = watch(capfd)
    assert code == 2
    assert f"runs/quick is watched by process {os.getpid()} on " in err
    lock.release()  # as the advice says: it has stopped
    assert watch(capfd)[0] == 0


def test_the_evaluator_of_a_tensorflow_cluster_watches(run: Path, capfd, monkeypatch):
    """`jtrain run` refuses this task, and its advice is this command."""
    workers = {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": workers, "task": task}))
    assert main(["run", "configs/quick.yaml"]) == 2
    assert "Start in its place: jtrain eval quick --watch" in capfd.readouterr().err
    assert watch(capfd)[0] == 0


LONG = ("steps=600", "checkpoint.every=40", "evaluate.every=0", "log.every=40")


@pytest.fixture
def study(tmp_path: Path, monkeypatch) -> Path:
    write_study(tmp_path, SLOW)
    at_home(tmp_path, monkeypatch, tmp_path / "compiled")
    return tmp_path


def start(*words: str, out: str) -> subprocess.Popen:
    with open(out, "a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "jtrain", *words], stdout=file, stderr=subprocess.STDOUT
        )


def ends(process: subprocess.Popen, out: str, code: int = 0) -> None:
    assert process.wait(timeout=400) == code, Path(out).read_text()


def test_a_watch_beside_a_training_process(study: Path):
    """It starts first; retention removes checkpoints; both die once and are started again."""
    run, words = Path("runs/quick"), ("eval", "quick", "--watch", "--json")
    train = ("run", "configs/quick.yaml", *LONG, "checkpoint.keep=2")
    Path("slow").touch()
    watcher, trainer = start(*words, out="watch.txt"), start(*train, out="train.txt")
    until(lambda: len(rows(run)) >= 2, trainer)
    Path("slow").unlink()
    trainer.kill()
    trainer.wait()
    watcher.kill()
    watcher.wait()
    watcher, trainer = start(*words, out="watch.txt"), start(*train, out="train.txt")
    ends(trainer, "train.txt")
    ends(watcher, "watch.txt")
    steps = [row["step"] for row in rows(run)]
    assert len(set(steps)) == len(steps) >= 3, "none twice"
    assert steps[-1] == 600, "the last one"
    assert not (run / PINS).exists()
    printed = [json.loads(x) for x in Path("watch.txt").read_text().splitlines() if x[:1] == "{"]
    assert [row["step"] for row in printed][-1] == 600


def test_several_processes_watch_and_sigterm_ends_them(study: Path):
    run = Path("runs/quick")
    trained("configs/quick.yaml", *KEEP_ALL)
    set_status(run, "running")
    words = ("launch", "--processes", "2", "--devices", "2", "eval", "quick", "--watch")
    layout_of_both = "parallel={kind: mirrored, devices: 2}"
    watcher = start(*words, layout_of_both, out="watch.txt")
    until(lambda: len(rows(run)) >= 3, watcher)
    watcher.send_signal(signal.SIGTERM)
    ends(watcher, "watch.txt", 75)
    assert [row["step"] for row in rows(run)] == [4, 8, 12]
    set_status(run, "done")
    watcher = start(*words, layout_of_both, out="watch.txt")
    ends(watcher, "watch.txt")
    assert [row["step"] for row in rows(run)] == [4, 8, 12]
