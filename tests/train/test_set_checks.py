"""Several evaluation sets, each at its cadence; the best is kept, and a run may end early."""

import json
from pathlib import Path

import pytest
from quick_study import CODE, rewrite, trained, write_study

from jtrain.checkpoint import CheckpointManager
from jtrain.cli import main
from jtrain.errors import ConfigError
from jtrain.train.hooks.log import read_results

CONFIG = "configs/quick.yaml"
ONE = "valid=InOrder(valid, size=self.evaluate.batch or self.batch),"
TWO = 'valid={"valid": InOrder(valid, size=24), "seen": InOrder(points(70, 2), size=16)},'
SETS = "evaluate={every: 4, sets: {seen: {every: 6}}}"
# With this rate it is best at step 2 and gets worse.
WORSE = ("optimizer.lr=2.0", "steps=30", "evaluate.every=2", "evaluate.patience=3")
BEST = (*WORSE, "checkpoint.best=loss")


@pytest.fixture(autouse=True)
def _home(study_home: Path):
    rewrite(ONE, TWO)


@pytest.mark.thorough
def test_each_set_has_its_cadence_and_all_are_measured_at_the_end(capsys):
    outcome = trained(CONFIG, SETS)
    found = {name: read_results(outcome.directory.metrics, name) for name in ("valid", "seen")}
    assert {name: list(rows) for name, rows in found.items()} == {
        "valid": [4, 8, 12],
        "seen": [6, 12],
    }
    assert found == outcome.sets
    assert outcome.results == found["valid"], "the first is what it is judged by"
    assert (found["valid"][12]["rows"], found["seen"][12]["rows"]) == (50, 70)
    assert trained(CONFIG, SETS).sets == found, "also of a run that was finished before"
    assert main(["eval", "quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"run": "quick", "step": 12} | {
        name: pytest.approx(rows[12], rel=1e-6) for name, rows in found.items()
    }
    assert main(["eval", "quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "quick at step 12 on valid",
        "quick at step 12 on seen",
    ]


@pytest.mark.thorough
def test_ends_when_nothing_improves_and_keeps_the_best():
    outcome = trained(CONFIG, *BEST)
    losses = {step: x["loss"] for step, x in outcome.results.items()}
    best = min(losses, key=lambda step: losses[step])
    assert (outcome.status, outcome.step) == ("done", best + 6)
    assert outcome.why == f"valid/loss was no better in 3 evaluations than at step {best}"
    with CheckpointManager(outcome.directory.checkpoints, best="loss") as checkpoints:
        assert checkpoints.best() == best, "though checkpoints are made every 5 steps"
    assert main(["eval", "quick", "--step", "best"]) == 0


def test_a_set_has_a_plain_name():
    write_study(Path("other"), CODE.replace(ONE, TWO.replace('"seen"', '"a/b"')))
    with pytest.raises(ConfigError, match=r"'a/b' has no plain name.*use a_b"):
        trained("other/configs/quick.yaml")
