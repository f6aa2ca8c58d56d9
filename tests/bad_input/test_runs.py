"""Errors between a good config and the first step, or in the data: reported, and fixed.

A case is a study with one mistake, in its code or in what was typed, what must be said of it, and
the edit that is advised; following it must train.
"""
# ruff: noqa: E501  (a case reads best on a line)

from pathlib import Path
from typing import NamedTuple

import pytest
from cases import by_name
from quick_study import CODE, YAML, at_home, write_study

from jtrain.cli import main

CONFIG = "configs/quick.yaml"
ROOT = Path(__file__).parents[2]
SHORT = ("steps=2", "checkpoint.every=0", "evaluate.every=0")
Edit = tuple[str, str]  # what is written, and what is written instead


class Case(NamedTuple):
    name: str
    code: tuple[Edit, ...]
    typed: tuple[str, ...]
    says: tuple[str, ...]
    mend: tuple[Edit, ...]  # of the code, or of what was typed


def code(name: str, wrong: Edit, *says: str, mend: Edit, typed: tuple[str, ...] = ()) -> Case:
    return Case(name, (wrong,), typed, says, (mend,))


def typed(setting: str, *says: str, mend: str, more: tuple[str, ...] = ()) -> Case:
    return Case(setting, (), (setting, *more), says, ((setting, mend),))


MIRRORED = ("parallel={kind: mirrored, devices: 4}",)
LOSS = 'return cross_entropy(x @ params["down"], batch["label"], batch["mask"])'
OUTPUTS = LOSS.removeprefix("return ")
SCALAR = f"mean = {OUTPUTS}[0]\n            return mean.total / mean.weight"
AS_A_MEAN = "return mean"
INIT = "return params, ()"
CASES = [
    # Batches and devices
    typed("batch=18", "batch: 18 rows do not divide into 4 devices x 1 microbatches = 4 parts", "Nearest: 16 or 20 (batch=16)",
          more=MIRRORED, mend="batch=16"),
    # Data
    typed("data.classes=2", "2 classes were configured, 0 .. 1", "of `label` is 2", "Set classes=3", mend="data.classes=3"),
    # Losses
    code("a plain mean where the last batch is padded", (LOSS, SCALAR),
         "the loss returned a plain scalar", "has rows that a mask hides", "Return a Mean instead",
         mend=("return mean.total / mean.weight", AS_A_MEAN)),
    code("a parameter that is not used", (INIT, 'params["spare"] = jnp.zeros(3)\n            return params, ()'),
         "not computed from the parameters 'spare'", "would get no gradient", "hold them in `extra`",
         mend=("return params, ()", 'return params, params.pop("spare")')),
    # Experiments
    code("a build of something else", ("return jt.Experiment(", "return dict("),
         "experiment quick: `build` must return a jt.Experiment and returned a dict", "Write `return jt.Experiment(",
         mend=("return dict(", "return jt.Experiment(")),
    typed("checkpoint.best=lowest acuracy", "acuracy is not a metric of the evaluation, which has loss, accuracy, rows",
          "did you mean accuracy?", mend="checkpoint.best=lowest accuracy"),
    code("the best without an evaluation", ("valid=InOrder(valid, size=self.evaluate.batch or self.batch),", ""),
         "loss is not a metric of the evaluation, which has none: there is no `valid`; give a set `valid`", typed=("checkpoint.best=loss",),
         mend=("optimizer=self.optimizer", "valid=InOrder(valid, size=self.batch),\n            optimizer=self.optimizer")),
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    """Write a study of this code into a directory of this name, and change to it."""

    def go(name: str, text: str = CODE) -> None:
        write_study(tmp_path / name, text, YAML.replace("adamw", "sgd"))  # soon compiled
        at_home(tmp_path / name, monkeypatch, compiled)

    return go


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    for old, new in edits:
        text = text.replace(old, new, 1)
    return text


QUICK = ["a build of something else"]
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.thorough
@pytest.mark.parametrize("case", by_name(BY_NAME, QUICK, pytest.mark.thorough))
def test_a_mistake_is_told_before_training_and_following_the_advice_trains(case, home, capfd):
    wrong = edited(CODE, case.code)
    home("wrong", wrong)
    assert main(["run", CONFIG, *case.typed]) == 2
    told = capfd.readouterr().err
    for words in case.says:
        assert words in told
    assert "Traceback" not in told
    assert not Path("runs/quick/run.json").exists()  # the name is still free
    mended = edited(wrong, case.mend), [edited(word, case.mend) for word in case.typed]
    assert mended != (wrong, [*case.typed])
    home("right", mended[0])
    assert main(["run", CONFIG, *mended[1], *SHORT]) == 0, capfd.readouterr().err


def test_a_text_longer_than_the_context_is_told(capfd):
    config = str(ROOT / "configs/shakespeare.yaml")
    assert main(["run", config, "data.context=128"]) == 2
    told = capfd.readouterr().err
    assert "128 characters are more than the model's context of 64" in told
    assert "set model.context=128 or data.context=64" in told
    assert main(["show", config, "data.context=128", "model.context=128"]) == 0


def test_experts_that_no_loss_balances_are_told(capfd):
    config = str(ROOT / "configs/shakespeare.yaml")
    assert main(["run", config, "model.experts.kind=dropless"]) == 2
    told = capfd.readouterr().err
    assert "model.experts.kind" in told
    assert "set model.experts.kind=none, or take experiment: language" in told
    assert main(["show", config, "model.experts.kind=none"]) == 0


def test_an_exception_of_the_experiment_is_shown_whole(home, capfd):
    home("here", CODE.replace("train, valid =", "[][self.data.rows]\n        train, valid ="))
    assert main(["run", CONFIG]) == 2
    told = capfd.readouterr().err
    assert told.startswith("`build` failed:\n  File ")
    assert 'experiments/quick.py", line' in told
    assert "IndexError: list index out of range" in told
    assert len(told.splitlines()) == 6


# NaN in the data
