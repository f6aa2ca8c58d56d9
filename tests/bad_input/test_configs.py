"""Errors in configs: each is reported with its place and a fix.

A case is a config or settings with one mistake, what the message must say, and the edit that it
advises; following it must work.
"""
# ruff: noqa: E501  (a case reads best on a line)

from pathlib import Path
from typing import NamedTuple

import pytest
from toy_study import YAML, write_study

from jtrain.cli import VERBS, main


class Case(NamedTuple):
    name: str
    file: str | bytes
    typed: tuple[str, ...]
    says: tuple[str, ...]
    mend: tuple[str | bytes, str | bytes]  # what is written, what the message says to write


def swap(old: str, new: str) -> str:
    """Return the good config with one change."""
    assert YAML.count(old) == 1, old
    return YAML.replace(old, new)


def file(name: str, text: str | bytes, *says: str, mend: tuple[str | bytes, str | bytes]) -> Case:
    return Case(name, text, (), says, mend)


def typed(setting: str, *says: str, mend: str) -> Case:
    return Case(setting, YAML, (setting,), (f"command line: {setting}", *says), (setting, mend))


MORE = "model:\n  "
CASES = [
    # Keys
    file("a misspelt key inside", swap("every:", "evry:"),
         "toy.yaml:5: checkpoint.evry: is not a key of checkpoint; it has every, grace, keep, keep_every, best", "did you mean every?",
         mend=("evry", "every")),
    file("a key of another kind", swap("b1: 0.8", "momentum: 0.8\n  lr: 1"),
         "toy.yaml:8: optimizer.momentum: is not a key of optimizer", "kind sgd has momentum",
         mend=("adamw", "sgd")),
    file("a dotted key in a file", YAML + "log.every: 5\n",
         "toy.yaml:9: log.every: is not a key", "in a file, write `log: {every: ...}`",
         mend=("log.every: 5", "log: {every: 5}")),
    file("a key that YAML 1.1 would merge", swap("steps: 10", "<<: other.yaml"),
         "toy.yaml:2: <<: is not a key", "to inherit, write `base: other.yaml`",
         mend=("<<: other.yaml", "base: other.yaml")),
    file("a key said twice", YAML + "steps: 20\n",
         "toy.yaml:9: steps: is given twice (first in line 2); keep one", mend=("steps: 20\n", "")),
    file("a missing key", swap("batch: 4\n", ""),
         "toy.yaml:1: batch: is missing; it needs a whole number above 0",
         mend=("steps: 10\n", "steps: 10\nbatch: 4\n")),
    file("no experiment", swap("experiment: toy\n", ""),
         "experiment: is missing; write `experiment: NAME`, there is toy",
         mend=("steps: 10\n", "steps: 10\nexperiment: toy\n")),
    # Values
    file("a whole number spelt as a float", swap("steps: 10", "steps: 1e1"),
         "toy.yaml:2: steps: must be a whole number above 0, found 10.0; write 10", mend=("1e1", "10")),
    file("more steps than can be counted", swap("steps: 10", "steps: 3000000000"),
         "toy.yaml:2: steps: 3000000000 is more than can be counted; at most 2147483647",
         mend=("3000000000", "2147483600")),
    file("a value for a mapping", swap("checkpoint:\n  every: 5", "checkpoint: 5"),
         "toy.yaml:4: checkpoint: must be a mapping with every, grace, keep, keep_every, best, store, on_damage, found 5",
         mend=("checkpoint: 5", "checkpoint: {every: 5}")),
    file("one of several types, and none of them", YAML + MORE + "size: atuo\n",
         'toy.yaml:10: model.size: must be a whole number or auto, found the text "atuo"', "did you mean auto?",
         mend=("atuo", "auto")),
    file("values that do not fit an experiment's own rule", YAML + MORE + "width: 30\n",
         "toy.yaml:9: model: width 30 is not a multiple of heads, 4; nearest 28", mend=("30", "28")),
    # Kinds
    file("an unknown kind", swap("adamw", "adamm"),
         'toy.yaml:7: optimizer.kind: must be one of sgd, adamw, found the text "adamm"', "did you mean adamw?",
         mend=("adamm", "adamw")),
    file("no kind", swap("kind: adamw", "lr: 1"),
         "toy.yaml:6: optimizer: has no kind, one of sgd, adamw; write `kind: adamw` in it",
         mend=("  lr: 1", "  kind: adamw\n  lr: 1")),
    # Names
    file("an unknown experiment", swap("toy", "tpy"),
         "toy.yaml:1: experiment: no experiment 'tpy'", "there is toy; did you mean toy?", mend=("tpy", "toy")),
    file("a path for an experiment", swap("toy", "experiments/toy.py"),
         "toy.yaml:1: experiment: must be a plain name", "never a path", "write toy",
         mend=("experiments/toy.py", "toy")),
    file("a path for a name", YAML + "name: runs/first\n",
         "toy.yaml:9: name: must be the name of a directory in runs/, no path, found 'runs/first'; write runs-first",
         mend=("runs/first", "runs-first")),
    # YAML
    file("a tab", swap("  every", "\tevery"),
         "toy.yaml:5: a tab; YAML indents with spaces: put two spaces in its place", mend=("\t", "  ")),
    file("no colon", swap("steps: 10", "steps 10"),
         "toy.yaml:2: a key without a `:`; write `key: value`", mend=("steps 10", "steps: 10")),
    file("a list that is never closed", YAML + MORE + "layers: [1, 2\nseed: 3\n",
         "toy.yaml:10: a `[` is opened here and never closed", mend=("[1, 2", "[1, 2]")),
    file("not UTF-8", swap("toy", "toy  # caf\xe9").encode("latin-1"),
         "toy.yaml:1: byte 0xe9 is not UTF-8; save the file as UTF-8", mend=(b"\xe9", "\xe9".encode())),
    file("an empty file", "", "toy.yaml: is empty; a config has at least experiment, steps and batch",
         mend=("", YAML)),
    # Inheritance
    file("a base that is not there", "base: othr.yaml\nsteps: 3\n",
         "toy.yaml:1: base:", "no such file; did you mean", "other.yaml?", mend=("othr", "other")),
    file("a base that is itself", "base: toy.yaml\nsteps: 3\n",
         "toy.yaml:1: base: inherits from itself: toy.yaml -> toy.yaml", mend=("toy.yaml", "other.yaml")),
    # What must fit together
    file("a batch that does not divide", YAML + "microbatches: 3\n",
         "toy.yaml:3: batch: 4 rows do not divide into 3 microbatches; nearest is 3 or 6 (batch=3)",
         mend=("batch: 4", "batch: 3")),
    file("a default that does not fit", swap("checkpoint:\n  every: 5\n", "log: {every: 5}\n").replace("10", "12")
         + "steps_per_call: 3\n",
         "toy.yaml: checkpoint.every: 500 is not a multiple of steps_per_call, 3; nearest is 498 or 501",
         mend=("steps_per_call: 3", "steps_per_call: 3\ncheckpoint: {every: 99}")),
    # The command line
    typed("steps=", "has no value; write steps=VALUE, a whole number above 0", mend="steps=20"),
    typed("guard.back=3", "is not a key of guard; it has kind, without, window; kind rollback has back; "
          "write guard.kind=rollback beside it", mend="guard={kind: rollback, back: 3, skip: 4}"),
    typed("=3", "is not a setting; write KEY=VALUE", mend="seed=3"),
    typed("base=other.yaml", "only a file can inherit; write `base: other.yaml` in it", mend="seed=1"),
    # What is typed of other libraries, and numbers that are names
    typed("optimizer=momentum", "write optimizer={kind: sgd, lr: 1e-3}", mend="optimizer={kind: sgd, lr: 1e-3}"),
    typed("name=3.10", "write name='\"3.10\"'", mend='name="3.10"'),
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = write_study(tmp_path)
    path.with_name("other.yaml").write_text(YAML)
    return path


def write(path: Path, text: str | bytes) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def mended(text, case: Case):
    """`text` after the edit, encoded as it is."""
    old, new = case.mend
    return text.replace(old, new, 1) if isinstance(text, type(old)) else text


@pytest.mark.parametrize("part", range(4))
def test_a_mistake_is_told_and_following_the_advice_works(part: int, path: Path, capsys):
    for case in CASES[part::4]:
        write(path, case.file)
        assert main(["show", str(path), *case.typed]) == 2, case.name
        told = capsys.readouterr().err
        for words in case.says:
            assert words in told, case.name
        for jargon in ("Traceback", "pydantic", "ruamel", "Input should", "dataclass", "NoneType"):
            assert jargon not in told, case.name
        after = mended(case.file, case), tuple(mended(word, case) for word in case.typed)
        assert after != (case.file, case.typed)
        write(path, after[0])
        code = main(["show", str(path), *after[1]])
        assert code == 0, (case.name, capsys.readouterr().err)


def test_twelve_mistakes_are_told_together(path: Path, capsys):
    wrong = (
        "experiment: toy\nstpes: 10\nbatch: four\ncheckpoint:\n  evry: 5\n  keep: 0\noptimizer:\n"
        "  kind: adamw\nseed: -1\nname: a/b/c\nlog: {evry: 1}\nevaluate: {batch: -1, every: x}\n"
        "microbatches: 0\nmicrobatches: 2\n"
    )
    write(path, wrong)
    assert main(["show", str(path), "steps=none"]) == 2
    lines = capsys.readouterr().err.splitlines()
    said = [line.partition("toy.yaml:")[2] for line in lines if "toy.yaml:" in line]
    places = [line.partition(":")[0] for line in said]
    assert [int(place) for place in places] == [2, 3, 5, 6, 9, 10, 11, 12, 12, 14]
    assert any(line.startswith("command line: steps=none") for line in lines)


COMMANDS = [
    (["show", "configs"], "configs: is a directory, and a config is a file; it has other.yaml, toy.yaml", ["show", "configs/toy.yaml"]),
    (["show", "configs/toy.yaml", "optimizer.lrr"], "lrr is not a key of optimizer; it has kind, lr", ["show", "configs/toy.yaml", "optimizer.lr"]),
    (["shw", "configs/toy.yaml"], f"shw is not a verb; the verbs are {', '.join(VERBS)}; did you mean show?", ["show", "configs/toy.yaml"]),
]  # fmt: skip


def test_a_mistake_in_the_command_is_told_and_mended(path: Path, monkeypatch, capsys):
    monkeypatch.chdir(path.parent.parent)
    for words, says, mend in COMMANDS:
        assert main(words) == 2
        told = capsys.readouterr().err
        assert says in told
        assert "Traceback" not in told
        assert main(mend) == 0


def test_a_config_without_experiments_beside_or_above_it_is_told_where_they_go(
    tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # whose experiments are found too
    path = tmp_path / "toy.yaml"
    path.write_text(YAML)
    assert main(["show", str(path)]) == 2
    assert "no experiment 'toy' in an experiments/ beside or above" in capsys.readouterr().err
    (tmp_path / "inner").mkdir()
    write_study(tmp_path / "inner")
    (tmp_path / "inner" / "experiments").rename(tmp_path / "experiments")
    assert main(["show", str(path)]) == 0


@pytest.mark.parametrize(
    ("setting", "says", "mend"),
    [
        ("data.context=128", "set model.context=128 or data.context=64", "data.context=64"),
        ("model.experts.kind=dropless", "set model.experts.kind=none", "model.experts.kind=none"),
        ("model.multi_token_depth=1", "set model.multi_token_depth=0", "model.multi_token_depth=0"),
        (
            "model.experts={kind: dropless, bias_update_rate: -1e-3}",
            "model.experts.bias_update_rate: ",
            "model.experts.kind=none",
        ),
    ],
)
def test_a_language_model_that_does_not_fit_its_data_or_loss_is_told(setting, says, mend, capfd):
    config = str(Path(__file__).parents[2] / "configs/shakespeare.yaml")
    assert main(["run", config, setting]) == 2
    assert says in capfd.readouterr().err
    assert main(["show", config, mend]) == 0
