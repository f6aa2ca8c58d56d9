"""Files that others remove or truncate are reported, and the run fails at its end, once."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from quick_study import at_home, config_of, trained, write_study

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.checkpoint.save_errors import SaveError
from jtrain.cli import main
from jtrain.train.hooks.metrics import read_metrics
from jtrain.train.run_result import RunResult

THOROUGH = pytest.mark.thorough
CONFIG = "configs/quick.yaml"
SHORT = ("checkpoint.every=3", "evaluate.every=6")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)
    return tmp_path


class At(jt.Hook):
    """Does something after a step, when the rows of the steps before it are written."""

    settles = True

    def __init__(self, step: int, act: Callable[[], object]):
        self.every, self._act = step, act

    def on_state(self, step, state, metrics):
        found = self._act() if step == self.every else None
        return found if isinstance(found, jt.Stop) else None


def stopped(step: int = 6) -> RunResult:
    return trained(CONFIG, *SHORT, hooks=[At(step, lambda: jt.Stop("a pause"))])


def cut(path: Path) -> None:
    """Truncate a file to a third, within a row."""
    os.truncate(path, path.stat().st_size // 3)


RUN = Path("runs/quick")


def said() -> str:
    return (RUN / "log.txt").read_text()


def again() -> RunResult:
    outcome = trained(CONFIG, *SHORT)
    assert said().count("LOST") == 1, "it is told once, and then the files are what they are"
    return outcome


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "act", "what"),
    [
        ("metrics.jsonl", Path.unlink, "it was removed while the run wrote it. All rows were"),
        ("metrics.jsonl", cut, "bytes are left: the rows after step 2 are lost"),
        pytest.param("steps.jsonl", cut, "bytes are left: all rows are lost", marks=THOROUGH),
    ],
)
def test_rows_that_go_in_mid_run_are_reported_at_the_next_write(
    name: str, act: Callable[[Path], object], what: str
):
    # Each checkpoint writes the rows of steps.jsonl up to its step.
    outcome = trained(CONFIG, *SHORT, hooks=[At(7, lambda: act(RUN / name))])
    assert (outcome.status, outcome.step) == ("failed", 12)
    assert f"{RUN / name}" in outcome.lost[0]
    assert what in outcome.lost[0]
    assert f"other processes removed or changed files of the run: {outcome.lost[0]}" in outcome.why
    log = said().splitlines()
    told = next(number for number, line in enumerate(log) if line == f"LOST: {outcome.lost[0]}")
    assert any("step 12/12" in line for line in log[told:]), "it is told at the next write"
    steps = [row["step"] for row in read_metrics(RUN / "metrics.jsonl") if "loss" in row]
    if act is cut and name == "metrics.jsonl":
        assert steps == [1, 2, 8, 9, 10, 11, 12]
    else:
        assert steps == list(range(1, 13))
    assert json.loads((RUN / "run.json").read_text())["lost"] == list(outcome.lost)
    assert again().status == "done"


@pytest.mark.sampled(2)
@THOROUGH
@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("steps.jsonl", Path.unlink),
        ("steps.jsonl", cut),
        ("metrics.jsonl", Path.unlink),
        ("metrics.jsonl", cut),
    ],
)
def test_rows_that_go_between_runs_are_reported_when_it_resumes(
    name: str, act: Callable[[Path], object]
):
    stopped()
    act(RUN / name)
    outcome = trained(CONFIG, *SHORT)
    assert (outcome.status, outcome.step) == ("failed", 12)
    assert outcome.lost[0].endswith("(as checkpoint 6 knows it)")
    assert ("is missing" if act is Path.unlink else "was truncated") in outcome.lost[0]
    assert again().status == "done"


@THOROUGH
def test_a_changed_row_is_reported():
    stopped()
    path = RUN / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 1'))
    outcome = trained(CONFIG, *SHORT)
    assert "was changed: its first" in outcome.lost[0]


@THOROUGH
def test_a_run_that_lost_rows_and_was_stopped_fails_at_its_end():
    hooks = [At(4, lambda: cut(RUN / "metrics.jsonl")), At(8, lambda: jt.Stop("a pause"))]
    first = trained(CONFIG, *SHORT, hooks=hooks)
    assert (first.status, first.step) == ("stopped", 8)
    outcome = trained(CONFIG, *SHORT)
    assert (outcome.status, outcome.lost) == ("failed", first.lost)
    assert trained(CONFIG, *SHORT).status == "done"


@THOROUGH
def test_a_run_that_was_done_is_checked_too(capfd: pytest.CaptureFixture[str]):
    assert trained(CONFIG, *SHORT).status == "done"
    cut(RUN / "metrics.jsonl")
    assert main(["run", CONFIG, *SHORT]) == 70
    shown, complaints = capfd.readouterr()
    assert complaints == ""
    assert "was done at step 12, and has lost rows since" in shown
    assert "failed at step 12: other processes removed or changed files of the run: " in shown
    assert main(["run", CONFIG, *SHORT]) == 0
    assert main(["run", CONFIG, *SHORT]) == 0


@THOROUGH
def test_a_run_that_says_done_too_early_is_not_believed():
    stopped()
    file = RUN / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "done", "why": ""}))
    outcome = trained(CONFIG, *SHORT)
    assert (outcome.status, outcome.step, outcome.lost) == ("done", 12, ())
    said_why = "was done at step 6, of 12, and nothing explains why it should have ended there"
    assert said_why in said()
    assert [row["step"] for row in read_metrics(RUN / "metrics.jsonl")][-3:] == [11, 12, 12]


def test_a_run_that_ended_early_for_a_reason_is_believed():
    ends = At(6, lambda: jt.Stop("good enough", kind="finished"))
    assert trained(CONFIG, *SHORT, hooks=[ends]).step == 6
    outcome = trained(CONFIG, *SHORT)
    assert (outcome.status, outcome.step) == ("done", 6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "how",
    ["moved", pytest.param("removed", marks=THOROUGH), pytest.param("replaced", marks=THOROUGH)],
)
def test_a_removed_directory_is_reported_and_not_recreated(how: str, capfd):
    place = RUN.with_name("elsewhere")

    def act():
        RUN.rename(place)
        if how == "removed":
            shutil.rmtree(place, ignore_errors=True)  # a save may be under way in it
        if how == "replaced":
            RUN.mkdir()

    words = "A directory was moved or removed: .* resumes from the newest in it"
    with pytest.raises(SaveError, match=words) as error:
        jt.run(config_of(CONFIG, SHORT), hooks=[At(4, act)])
    assert error.value.code == 70
    assert capfd.readouterr().out.count("LOST: runs/quick was moved or removed while") == 1
    assert not RUN.exists()
    if how == "moved":
        steps = [row["step"] for row in read_metrics(place / "metrics.jsonl")]
        assert steps[-1] > 4, "rows go with their file"
        place.rename(RUN)
        assert trained(CONFIG, *SHORT).step == 12


@THOROUGH
@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_run_json_and_config_yaml_are_rewritten(name: str):
    calm = trained(CONFIG, *SHORT, "name=calm")
    outcome = trained(CONFIG, *SHORT, hooks=[At(4, lambda: (RUN / name).unlink())])
    assert (outcome.status, outcome.step) == ("failed", 12)
    assert f"{name} was removed" in outcome.lost[0]
    assert again().status == "done"
    assert outcome.directory.facts().keys() - {"lost"} == calm.directory.facts().keys()
    assert config_of(outcome.directory.config) == config_of(CONFIG, SHORT)


@THOROUGH
def test_removed_checkpoints_are_reported_and_the_next_one_is_kept():
    folder = RUN / "checkpoints"
    outcome = trained(CONFIG, *SHORT, hooks=[At(7, lambda: folder.rename("elsewhere"))])
    assert (outcome.status, outcome.step) == ("failed", 12)
    assert "checkpoints was moved or removed, and the checkpoints in it" in outcome.lost[0]
    assert again().status == "done"


@THOROUGH
def test_a_removed_checkpoint_is_reported():
    def act():
        while CheckpointManager(RUN / "checkpoints").newest() != 6:
            time.sleep(0.01)
        shutil.rmtree(RUN / "checkpoints" / "6")

    outcome = trained(CONFIG, *SHORT, "steps=10", hooks=[At(8, act)])
    assert (outcome.status, outcome.step) == ("failed", 10)
    assert "was removed or damaged after it was sealed" in outcome.lost[0]


def test_a_removed_lock_is_rewritten():
    writer = RUN / "checkpoints" / ".writer"
    there = []
    hooks = [At(4, writer.unlink), At(11, lambda: there.append(writer.exists()))]
    outcome = trained(CONFIG, *SHORT, hooks=hooks)
    assert there == [True]
    assert ".writer was removed while this process wrote there" in outcome.lost[0]


@THOROUGH
def test_plain_files_of_the_names_of_leftovers_are_no_reason_to_end():
    stopped(4)
    folder = RUN / "checkpoints"
    names = ("3.deleting", "9.saving", "6.deleting", "12.replaced")
    for name in names:
        (folder / name).write_text("no folder")
    outcome = trained(CONFIG, *SHORT)
    assert (outcome.status, outcome.step, outcome.lost) == ("done", 12, ())
    assert sorted(path.name for path in folder.iterdir()) == ["12", "9"]


@THOROUGH
def test_fit_gives_what_was_trained_and_warns():
    rows = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    loss = lambda p, batch, rng: jt.Mean.of((batch["x"] @ p["w"]) ** 2, batch["mask"])
    metrics = Path("runs/fitted/metrics.jsonl")
    with pytest.warns(UserWarning, match="jt.fit: other processes removed or changed files"):
        result = jt.fit(
            loss, {"w": np.ones(2)}, {"x": rows}, steps=8, name="fitted", quiet=True,
            hooks=[At(4, metrics.unlink)]
        )  # fmt: skip
    assert result.step == 8
