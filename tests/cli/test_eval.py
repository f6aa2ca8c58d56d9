"""`jtrain eval`: the exact metrics of a checkpoint, under any layout."""
# ruff: noqa: E501  (a case reads best on a line)

import json
from pathlib import Path

import pytest

from jtrain.cli import main
from jtrain.train.run_result import RunResult

pytestmark = pytest.mark.thorough

SETTINGS = ("checkpoint.every=4", "evaluate.every=4", "checkpoint.keep=1")


@pytest.fixture(name="outcome", autouse=True)
def _outcome(copy_of) -> RunResult:
    """Work beside a run whose best step (by the highest loss) is not its newest."""
    return copy_of(*SETTINGS, "checkpoint.best=highest loss")


def evaluated(capfd, *words: str) -> dict:
    assert main(["eval", *words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_a_run_is_found_by_its_name_and_by_its_directory(outcome: RunResult, capfd):
    found = evaluated(capfd, "./runs/quick/")
    assert found == {"run": "./runs/quick/", "step": 12, "valid": dict(outcome.results[12])}


def test_the_best_the_newest_and_a_number_name_a_step(outcome: RunResult, capfd):
    best = max(outcome.results, key=lambda step: outcome.results[step]["loss"])
    assert best < 12
    for step, asked in ((best, "best"), (12, "newest"), (best, str(best))):
        found = evaluated(capfd, "quick", "--step", asked)
        assert (found["step"], found["valid"]) == (step, dict(outcome.results[step]))


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel={kind: mirrored, devices: 4, impl: shard_map}", "evaluate.batch=12"),
        ("parallel={kind: fsdp, devices: 8, min_size: 0}", "evaluate.batch=64"),
        ("evaluate.batch=7",),
    ],
)
def test_no_layout_and_no_batch_changes_a_number_and_none_changes_the_run(
    settings, outcome: RunResult, capfd
):
    contents = lambda: {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    files = contents()
    found = evaluated(capfd, "quick", *settings)["valid"]
    assert found == pytest.approx(outcome.results[12], rel=1e-6)
    assert found["rows"] == 50
    assert contents() == files


@pytest.mark.parametrize(
    ("words", "says", "mend"),
    [
        (["quik"], "there is quick; did you mean quick?", ["quick"]),
        (["quick", "model.width=9"], "model.width: 8 there, 9 here\nLeave them as they are; parallel, ", ["quick"]),
        (["quick", "checkpoint.best=lowest accuracy", "--step", "best"], "has no best checkpoint; it has steps", ["quick", "--step", "best"]),
    ],
)  # fmt: skip
def test_an_error_is_reported_and_the_advice_works(words, says, mend, capfd):
    assert main(["eval", *words]) == 2
    error_text = capfd.readouterr().err
    assert says in error_text
    assert "Traceback" not in error_text
    assert main(["eval", *mend]) == 0


def test_a_damaged_checkpoint_is_a_fault_and_not_a_user_error(capfd):
    path = next(Path("runs/quick/checkpoints/12").rglob("d/*"))
    path.write_bytes(path.read_bytes()[::-1])
    assert main(["eval", "quick"]) == 70
    error_text = capfd.readouterr().err
    assert "checkpoint 12 is damaged: " in error_text
    advised = error_text.rpartition("jtrain eval takes ")[2].rstrip(".\n").split()
    assert main(["eval", "quick", *advised]) == 0
