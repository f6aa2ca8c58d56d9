"""The mistakes of a first day at the command line and in an experiment: what to type, exit code 2."""

from pathlib import Path
from typing import NamedTuple

import pytest
from quick_study import CODE, YAML, at_home, write_study

from jtrain.cli import main

# ruff: noqa: E501  (a case reads best on a line)
CONFIG = "configs/quick.yaml"
HAND_OVER = 'return cross_entropy(x @ params["down"], batch["label"], batch["mask"])'


class Case(NamedTuple):
    name: str
    says: str
    types: str
    words: tuple[str, ...] = ("run", CONFIG)
    edit: tuple[str, str] = ("", "")  # of the experiment


CASES = [
    Case("a misspelt synonym", "optimizer.lerning_rate=3: is no key", "did you mean optimizer.lr?",
         ("run", CONFIG, "optimizer.lerning_rate=3")),
    Case("spaces around =", "steps = 100: a setting has no spaces around its `=`",
         f"write jtrain run {CONFIG} steps=100", ("run", CONFIG, "steps", "=", "100")),
    Case("a space after =", "steps= 100: a setting has no spaces", f"run {CONFIG} steps=100 seed=1",
         ("run", CONFIG, "steps=", "100", "seed=1")),
    Case("a space before =", "steps =100: a setting has no spaces", "steps=100",
         ("show", CONFIG, "steps", "=100")),
    Case("a key as an option", "no option --steps", "a value is set by steps=100",
         ("run", CONFIG, "--steps", "100")),
    Case("a key as an option with =", "no option --steps=100", "a value is set by steps=100",
         ("run", CONFIG, "--steps=100")),
    Case("a dash in a key", "no option --batch-size", "a value is set by batch_size=8",
         ("run", CONFIG, "--batch-size", "8")),
    Case("a misspelt option", "no option --fats", "did you mean --fast?", ("run", CONFIG, "--fats")),
    Case("no config", "a config file is missing", "write jtrain run configs/shakespeare.yaml; configs/ has quick",
         ("run",)),
    Case("a setting for a config", "the first word is a config file, found steps=3",
         "write jtrain run configs/NAME.yaml steps=3", ("run", "steps=3")),
    Case("no run", "the following arguments are required: RUN", "write jtrain eval runs/shakespeare",
         ("eval",)),
    Case("a word too many", "jtrain ckpt diff: 3 is one word too many", "write jtrain ckpt diff shakespeare shakespeare-2",
         ("ckpt", "diff", "quick", "2", "3")),
    Case("two mistakes at once", "steps=many: must be a whole number above 0", "did you mean adam?",
         ("run", CONFIG, "steps=many", "optimizer.kind=adm")),
    Case("a config that is nearly there", "no such file", "did you mean configs/quick.yaml?",
         ("run", "configs/quik.yaml")),
    Case("a config that comes with jtrain", "no such file", "did you mean digits, which comes with",
         ("show", "digts")),
    Case("a file that is not there", "`build` cannot open rows.npy (no such file or directory)",
         "Did you mean row.npy?", edit=("train, valid =", 'np.load("rows.npy")\n        train, valid ='),
         ),
    Case("a file in a folder that is not there", "`build` cannot open sets/rows.npy",
         "Write the path in full: ",
         edit=("train, valid =", 'np.load("sets/rows.npy")\n        train, valid =')),
    Case("a key of a batch", "the loss asks for 'labels', and `batch` has label (int32[16]), x",
         "Write 'label'.", edit=('batch["label"]', 'batch["labels"]')),
    Case("a loss of two arguments", "the loss is called as loss(params, batch, rng)",
         "Write: def loss(params, batch, rng):", edit=("batch, rng):", "batch):")),
    Case("only parameters", "init returns (params, extra), and this one returned a dict",
         "return params, ()", edit=("return params, ()", "return params")),
    Case("whole numbers for parameters", "The parameter spare holds int32 values", "as float32",
         edit=("return params, ()", 'params["spare"] = jnp.zeros(3, int)\n            return params, ()')),
    Case("an attribute that is not there", "module 'jax.numpy' has no attribute 'softmax'",
         "Write jax.nn.softmax.", edit=(HAND_OVER, "return jnp.softmax(x)")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_mistake_ends_with_2_and_what_to_type(case: Case, tmp_path, monkeypatch, compiled, capfd):
    assert case.edit[0] in CODE
    code = CODE.replace(*case.edit, 1) if case.edit[0] else CODE
    write_study(tmp_path, code, YAML.replace("adamw", "sgd"))
    at_home(tmp_path, monkeypatch, compiled)
    Path("row.npy").touch()
    assert main(case.words) == 2
    told = capfd.readouterr().err
    assert case.says in told, told
    assert case.types in told, told
    assert "Traceback" not in told
    assert len(told.splitlines()) <= 8
    if case.edit[0] and "return" not in case.edit[1]:
        assert 'experiments/quick.py", line' in told


def test_outside_of_a_project_the_advice_names_what_comes_with_jtrain(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(("run",)) == 2
    told = capfd.readouterr().err
    assert "write jtrain run shakespeare; these come with jtrain: additions, chat" in told
    assert main(("show", "shakespeare")) == 0, "the advice works"
