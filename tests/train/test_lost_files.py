"""What others remove while a run trains stays removed, and the run takes its steps."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from quick_study import at_home, config_of, trained, write_study

import jtrain as jt
from jtrain.checkpoint.save_errors import SaveError
from jtrain.train.hooks.metrics import read_metrics

CONFIG = "configs/quick.yaml"
SHORT = ("checkpoint.every=3", "evaluate.every=6")
RUN = Path("runs/quick")


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


@pytest.mark.parametrize(
    "names",
    [
        ("metrics.jsonl", "steps.jsonl", "run.json", "config.yaml"),
        pytest.param(("checkpoints",), marks=pytest.mark.thorough),
        pytest.param(("checkpoints/.writer",), marks=pytest.mark.thorough),
    ],
)
def test_a_run_whose_files_are_removed_takes_its_steps(names: Sequence[str]):
    def remove() -> None:
        for name in names:
            (RUN / name).rename(name.replace("/", "-") + ".old")

    outcome = trained(CONFIG, *SHORT, hooks=[At(7, remove)])
    assert (outcome.status, outcome.step, outcome.checkpoint) == ("done", 12, 12)
    assert (RUN / "metrics.jsonl").exists() == ("metrics.jsonl" not in names), "it stays removed"
    assert trained(CONFIG, *SHORT).status == "done"


def test_moving_the_directory_of_a_run_ends_it():
    place = RUN.with_name("elsewhere")

    def move() -> None:
        while not (RUN / "checkpoints" / "3").exists():
            time.sleep(0.01)
        RUN.rename(place)

    words = "A directory was moved or removed: .* resumes from the newest in it"
    with pytest.raises(SaveError, match=words) as error:
        jt.run(config_of(CONFIG, SHORT), hooks=[At(4, move)])
    assert error.value.code == 70
    assert not RUN.exists()
    steps = [row["step"] for row in read_metrics(place / "metrics.jsonl")]
    assert steps[-1] > 4, "rows go with their file"
    place.rename(RUN)
    assert trained(CONFIG, *SHORT).step == 12


@pytest.mark.thorough
def test_a_run_that_says_done_too_early_is_not_believed():
    trained(CONFIG, *SHORT, hooks=[At(6, lambda: jt.Stop("a pause"))])
    file = RUN / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "done", "why": ""}))
    outcome = trained(CONFIG, *SHORT)
    assert (outcome.status, outcome.step) == ("done", 12)
    words = "was done at step 6, of 12, and nothing explains why it should have ended there"
    assert words in (RUN / "log.txt").read_text()
    assert [row["step"] for row in read_metrics(RUN / "metrics.jsonl")][-3:] == [11, 12, 12]


def test_a_run_that_ended_early_for_a_reason_is_believed():
    ends = At(6, lambda: jt.Stop("good enough", kind="finished"))
    assert trained(CONFIG, *SHORT, hooks=[ends]).step == 6
    outcome = trained(CONFIG, *SHORT)
    assert (outcome.status, outcome.step) == ("done", 6)


@pytest.mark.thorough
def test_plain_files_of_the_names_of_leftovers_are_no_reason_to_end():
    trained(CONFIG, *SHORT, hooks=[At(4, lambda: jt.Stop("a pause"))])
    folder = RUN / "checkpoints"
    for name in ("3.deleting", "9.saving", "6.deleting", "12.replaced"):
        (folder / name).write_text("no folder")
    outcome = trained(CONFIG, *SHORT)
    assert (outcome.status, outcome.step) == ("done", 12)
    assert sorted(path.name for path in folder.iterdir()) == ["12", "9"]
