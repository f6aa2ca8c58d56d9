"""`jtrain eval --watch`: each new checkpoint of a run is evaluated once, beside the training."""
# ruff: noqa: E501  (a case reads best on a line)

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from quick_study import at_home, trained, write_study
from watched_run import KEEP_ALL, rows, set_status

from jtrain.checkpoint import layout
from jtrain.checkpoint.lock import WriteLock
from jtrain.cli import find_run, main
from jtrain.distributed.heartbeat.noted_signals import NotedSignals
from jtrain.inspect.report.read_run import read_run
from jtrain.train import watch_run, watched_checkpoints
from jtrain.train.evaluation_rows import NAME
from jtrain.train.run_result import RunResult
from jtrain.train.trackers import TensorBoard, TrackedRun
from jtrain.train.watched_checkpoints import PINS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def outcome(place: Path) -> RunResult:
    with pytest.MonkeyPatch.context() as patch:
        at_home(place, patch, place / "compiled")
        return trained(write_study(place), *KEEP_ALL, "evaluate.every=4")


@pytest.fixture
def run(place: Path, outcome: RunResult, tmp_path: Path, monkeypatch) -> Path:
    """A finished run with checkpoints 4, 8 and 12, in a folder of its own."""
    del outcome
    at_home(tmp_path, monkeypatch, place / "compiled")
    monkeypatch.setattr(watch_run, "POLL", 0.05)
    for name in ("experiments", "configs", "runs"):
        shutil.copytree(place / name, tmp_path / name)
    return Path("runs/quick")


def watch(capfd, *words: str) -> tuple[int, list[dict], str]:
    """Watch the run; return exit code, printed rows and messages."""
    code = main(["eval", "quick", "--watch", "--json", *words])
    out, err = capfd.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def add_tracker(run: Path) -> None:
    path = run / "config.yaml"
    before = path.read_text()
    after = before.replace("trackers: []", "trackers: [{kind: tensorboard}]")
    assert after != before
    path.write_text(after)


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
    add_tracker(run)
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


def test_a_tracker_that_is_not_installed_is_named(run: Path, capfd, monkeypatch):
    monkeypatch.setattr(TensorBoard, "package", "no_such_package")
    add_tracker(run)
    code, _, err = watch(capfd)
    assert code == 2
    assert "no_such_package" in err
    assert "trackers=[]" in err


@pytest.mark.thorough
def test_latest_leaves_older_ones_out(run: Path, capfd):
    code, printed, _ = watch(capfd, "--policy", "latest")
    assert (code, [row["step"] for row in printed]) == (0, [12])


def test_the_report_has_the_rows_beside_those_of_the_run(run: Path, capfd):
    kept = [row for row in (run / "metrics.jsonl").read_text().splitlines() if "valid/" not in row]
    own = read_run(run).metrics
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    assert watch(capfd)[0] == 0
    story = read_run(run)
    found = {row["step"]: row["valid/loss"] for row in story.metrics if "valid/loss" in row}
    expected = {row["step"]: row["valid/loss"] for row in own if "valid/loss" in row}
    assert found == pytest.approx(expected, rel=1e-6)
    assert story.troubles == ()


@pytest.mark.thorough
def test_rows_of_the_run_itself_are_not_repeated(run: Path, capfd):
    before = read_run(run).metrics
    assert watch(capfd)[0] == 0
    assert read_run(run).metrics == before


def test_rows_of_another_run_in_the_directory_are_replaced(run: Path, capfd):
    (run / NAME).write_text('{"step": 4, "valid/loss": 9.0, "run": "another"}\n{"step": 8, "va')
    code, printed, _ = watch(capfd)
    assert (code, [row["step"] for row in printed]) == (0, [4, 8, 12])
    assert [row["step"] for row in rows(run)] == [4, 8, 12]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_pinned(run: Path, capfd, monkeypatch):
    """Retention of the training process removes each checkpoint once it is chosen."""
    plain = watch_run._evaluate

    def evaluate(setup, run_dir, step, asked, log):
        layout.delete_checkpoint(run_dir.checkpoints, step)
        return plain(setup, run_dir, step, asked, log)

    monkeypatch.setattr(watch_run, "_evaluate", evaluate)
    code, printed, _ = watch(capfd)
    assert (code, [row["step"] for row in printed]) == (0, [4, 8, 12])
    assert layout.list_named_steps(run / "checkpoints") == []


def test_a_checkpoint_that_is_removed_before_is_skipped_with_a_line(run: Path, capfd, monkeypatch):
    plain = shutil.copytree

    def copytree(source, *args, **options):
        copied = plain(source, *args, **options)
        if Path(source).name == "8":
            layout.delete_checkpoint(Path(source).parent, 8)
            raise FileNotFoundError(source)
        return copied

    monkeypatch.setattr("jtrain.checkpoint.pinned.shutil.copytree", copytree)
    code, printed, err = watch(capfd)
    assert not (run / watched_checkpoints.PINS).exists(), "nothing of it is left"
    assert (code, [row["step"] for row in printed]) == (0, [4, 12])
    assert "checkpoint 8 in " in err
    assert "a larger checkpoint.keep leaves more time. It is skipped" in err


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


def test_a_checkpoint_that_was_removed_and_is_saved_again_is_evaluated(
    run: Path, capfd, monkeypatch
):
    """A rollback removes checkpoint 12 while 4 is evaluated, and the run saves another one."""
    plain = watch_run._evaluate
    shutil.copytree(run / "checkpoints" / "12", run / "later")

    def evaluate(setup, run_dir, step, asked, log):
        if step == 4:
            layout.delete_checkpoint(run_dir.checkpoints, 12)
        if step == 8:
            (run / "later").rename(run_dir.checkpoints / "12")
        return plain(setup, run_dir, step, asked, log)

    monkeypatch.setattr(watch_run, "_evaluate", evaluate)
    code, printed, err = watch(capfd)
    assert (code, [row["step"] for row in printed]) == (0, [4, 8, 12])
    assert "checkpoint 12 was removed before its turn, and is skipped" in err


@pytest.mark.thorough
def test_a_disk_without_links_is_copied(run: Path, capfd, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("jtrain.checkpoint.pinned.os.link", refuse)
    code, printed, _ = watch(capfd)
    assert (code, [row["step"] for row in printed]) == (0, [4, 8, 12])


def test_a_damaged_checkpoint_is_skipped_and_a_damaged_last_one_is_a_fault(run: Path, capfd):
    for step in (8, 12):
        path = next(Path(f"runs/quick/checkpoints/{step}").rglob("d/*"))
        path.write_bytes(path.read_bytes()[::-1])
    code, printed, err = watch(capfd)
    assert (code, [row["step"] for row in printed]) == (70, [4])
    assert "checkpoint 8 is damaged" in err
    assert "its last checkpoint (12) cannot be evaluated" in err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        ("running", 70, "nothing of the run has changed for 0.3 s, though its status is running"),
        ("stopped", 75, "the run is stopped, and was not resumed within 0.3 s"),
        ("crashed", 70, "the run is crashed, and was not resumed within 0.3 s"),
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


@pytest.mark.thorough
def test_a_run_that_goes_on_is_followed(run: Path, capfd):
    """A stopped run resumes: its next checkpoint appears by a rename, and it ends."""
    shutil.move(run / "checkpoints" / "12", run / "later")
    set_status(run, "stopped")

    def resume():
        while len(rows(run)) < 2:
            time.sleep(0.02)
        set_status(run, "running")
        (run / "later").rename(run / "checkpoints" / "12")
        set_status(run, "done")

    thread = threading.Thread(target=resume)
    thread.start()
    code, printed, _ = watch(capfd, "--timeout", "30")
    thread.join()
    assert (code, [row["step"] for row in printed]) == (0, [4, 8, 12])


def test_two_watches_do_not_evaluate_the_same_run(run: Path, capfd):
    lock = WriteLock(run / PINS)
    code, _, err = watch(capfd)
    assert code == 2
    assert f"runs/quick is watched by process {os.getpid()} on " in err
    lock.release()  # as the advice says: it has stopped
    assert watch(capfd)[0] == 0


def test_a_run_that_has_not_begun_is_waited_for(run: Path, capfd, monkeypatch):
    run.rename("later")
    plain = find_run.print_error

    def begin(line: str) -> None:
        plain(line)
        if "waiting for" in line:
            Path("later").rename(run)

    monkeypatch.setattr("jtrain.cli.eval.print_error", begin)
    code, printed, err = watch(capfd)
    assert (code, len(printed)) == (0, 3)
    assert "waiting for quick to begin" in err


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "says", "mend"),
    [
        (["--watch", "--step", "4"], "--step 4 names one. Leave one", ["--watch"]),
        (["--watch", "--timeout", "-1"], "--timeout -1 is no number of seconds", ["--watch", "--timeout", "1"]),
        (["--watch", "--timeout", "nan"], "--timeout nan is no number of seconds", ["--watch", "--timeout", "1"]),
        (["--watch", "--policy", "best"], "invalid choice: 'best' (choose from", ["--watch", "--policy", "latest"]),
        (["--policy", "latest"], "--policy is for --watch. Add --watch", ["--policy", "latest", "--watch"]),
        (["--timeout", "5"], "--timeout is for --watch. Add --watch", []),
        (["--watch", "model.width=9"], "model.width: 8 there, 9 here", ["--watch"]),
    ],
)  # fmt: skip
def test_an_error_is_reported_and_the_advice_works(run: Path, words, says, mend, capfd):
    assert main(["eval", "quick", *words]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert main(["eval", "quick", *mend]) == 0


def test_the_evaluator_of_a_tensorflow_cluster_watches(run: Path, capfd, monkeypatch):
    """`jtrain run` refuses this task, and its advice is this command."""
    workers = {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": workers, "task": task}))
    assert main(["run", "configs/quick.yaml"]) == 2
    assert "Start in its place: jtrain eval quick --watch" in capfd.readouterr().err
    assert watch(capfd)[0] == 0


def test_a_run_that_never_begins_ends_with_the_runs_that_exist(run: Path, capfd):
    assert main(["eval", "quik", "--watch", "--timeout", "0.2"]) == 2
    assert "in runs/ there is quick; did you mean quick?" in capfd.readouterr().err


def test_a_signal_ends_the_watch_between_two_checkpoints(run: Path, capfd):
    set_status(run, "running")

    def interrupt():
        while len(rows(run)) < 3:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code, printed, err = watch(capfd)
    thread.join()
    assert (code, len(printed)) == (75, 3)
    assert "SIGTERM: the watch ends; the same command goes on with it" in err
    set_status(run, "done")
    assert watch(capfd)[:2] == (0, [])


def test_handlers_are_those_of_before_after_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with NotedSignals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.name == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second one ends the process"
    assert signal.getsignal(signal.SIGTERM) is before
