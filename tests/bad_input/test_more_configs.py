"""More of what people get wrong in a config: limits, names, durations, and what a text can hide.

As test_configs.py, whose cases come first in the corpus.
"""
# ruff: noqa: E501  (a case reads best on a line)

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_configs as first
from test_configs import MORE, YAML, Case, file, swap, typed, write

from jtrain.cli import main
from jtrain.config.read import AGAIN, SIZE, VALUES

path = first.path
BOMB = "  a: &a [1,2,3,4,5,6,7,8,9,10]\n  b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n  c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n  d: [*c,*c,*c,*c]\n"
CASES = [
    # Limits of top keys
    file("a batch of nothing", swap("batch: 4", "batch: 0"),
         "toy.yaml:3: batch: must be a whole number above 0, found 0", mend=("batch: 0", "batch: 1")),
    file("a batch below nothing", swap("batch: 4", "batch: -4"),
         "toy.yaml:3: batch: must be a whole number above 0, found -4", mend=("-4", "4")),
    file("no microbatch", YAML + "microbatches: 0\n",
         "toy.yaml:9: microbatches: must be a whole number above 0, found 0", mend=("s: 0", "s: 1")),
    file("no step a call", YAML + "steps_per_call: 0\n",
         "toy.yaml:9: steps_per_call: must be auto or a whole number above 0, found 0",
         mend=("call: 0", "call: auto")),
    file("a seed that is too large", YAML + "seed: 4294967296\n",
         "toy.yaml:9: seed: must be a whole number at least 0 and below 4294967296", mend=("4294967296", "4294967295")),
    file("a fraction of a seed", YAML + "seed: 1.5\n", "toy.yaml:9: seed: must be a whole number", "found 1.5", mend=("1.5", "1")),
    file("no checkpoint kept", swap("every: 5", "keep: 0"),
         "toy.yaml:5: checkpoint.keep: must be a whole number at least 1, found 0", mend=("keep: 0", "keep: 1")),
    file("a number for the best", swap("every: 5", "best: 1"), "toy.yaml:5: checkpoint.best: must be text, found 1", mend=("best: 1", "best: loss")),
    file("a batch of evaluation below nothing", YAML + "evaluate: {batch: -1}\n",
         "toy.yaml:9: evaluate.batch: must be a whole number at least 0, found -1", mend=("-1", "4")),
    file("a set that is a number", YAML + "evaluate: {sets: {valid: 5}}\n",
         "toy.yaml:9: evaluate.sets.valid: must be a mapping with every, found 5", mend=("valid: 5", "valid: {every: 5}")),
    file("a set with a key of another", YAML + "evaluate: {sets: {valid: {evry: 5}}}\n",
         "toy.yaml:9: evaluate.sets.valid.evry: is no key", "did you mean every?", mend=("evry", "every")),
    file("patience without a goal", swap("  every: 5", "  keep: 1") + "evaluate: {patience: 3}\n",
         "toy.yaml:9: evaluate.patience: needs a metric; set checkpoint.best=loss", mend=("keep: 1", "best: loss")),
    # Durations
    file("a duration of nothing known", swap("steps: 10", "steps: 10 parsecs"), "toy.yaml:2: steps: must be", "parsecs", mend=("10 parsecs", "10")),
    file("a duration without a number", swap("steps: 10", "steps: epochs"), "toy.yaml:2: steps: must be", "epochs", mend=("epochs", "3 epochs")),
    file("a duration below nothing", swap("every: 5", "every: -5%"), "toy.yaml:5: checkpoint.every: must be", mend=("-5%", "5")),
    file("a share of the whole for the whole", swap("steps: 10", "steps: 10%"), "toy.yaml:2: steps: must be", "10%", mend=("10%", "10")),
    # Names
    file("a name with a colon", YAML + "name: my:run\n", "toy.yaml:9: name: must be the name of a directory in runs/", "write my-run", mend=("my:run", "my-run")),
    file("a name with a line in it", YAML + 'name: "a\\nb"\n', "toy.yaml:9: name: must be the name of a directory", "write a-b", mend=('"a\\nb"', "a-b")),
    file("a name that is hidden", YAML + "name: .run\n", "toy.yaml:9: name: must be the name of a directory", "write run", mend=(".run", "run")),
    file("a name that is a place", YAML + "name: /tmp/run\n", "toy.yaml:9: name: must be the name of a directory", mend=("/tmp/run", "run")),
    file("a name of 300 letters", YAML + f"name: {'a' * 300}\n", "toy.yaml:9: name: must be the name of a directory", mend=("a" * 300, "a")),
    file("a name with a nought", YAML + 'name: "a\\0b"\n', "toy.yaml:9: name: must be the name of a directory", mend=('"a\\0b"', "ab")),
    file("a number for a name", YAML + "name: 3\n", "toy.yaml:9: name: must be text, found 3", mend=("name: 3", "name: '3'")),
    file("an experiment with a dash", swap("toy", "my-toy"), "toy.yaml:1: experiment: must be a plain name", mend=("my-toy", "toy")),
    file("a number for an experiment", swap("experiment: toy", "experiment: 3"), "toy.yaml:1: experiment: must be", mend=("experiment: 3", "experiment: toy")),
    file("a function for an experiment", swap("toy", "os:system"), "toy.yaml:1: experiment: must be a plain name", mend=("os:system", "toy")),
    file("a module for an experiment", swap("toy", "os.path"), "toy.yaml:1: experiment: must be a plain name", mend=("os.path", "toy")),
    file("a list for an experiment", swap("experiment: toy", "experiment: [toy]"), "toy.yaml:1: experiment: must be text, found a list", mend=("[toy]", "toy")),
    # YAML 1.2 and no other
    file("on for true", YAML + MORE + "bias: on\n", 'must be true or false, found the text "on"', mend=("on\n", "true\n")),
    file("an octal number of another YAML", YAML + MORE + "title: 012\n", "toy.yaml:10: model.title: must be text, found 12", mend=("012", "'012'")),
    file("a number in base 60", YAML + MORE + "width: 1:30\n", 'toy.yaml:10: model.width: must be a whole number above 0, found the text "1:30"', mend=("1:30", "32")),
    file("a number with underscores", YAML + MORE + "width: 1_000\n", "toy.yaml:10: model.width: must be a whole number above 0, found the text", mend=("1_000", "1000")),
    file("a date for a number", YAML + MORE + "width: 2026-11-22\n", "toy.yaml:10: model.width: must be a whole number above 0, found the text", mend=("2026-11-22", "32")),
    file("a binary", YAML + MORE + "title: !!binary aGk=\n", "toy.yaml:10: model.title:", "is no data", mend=("!!binary ", "")),
    file("a set", YAML + MORE + "layers: !!set {1, 2}\n", "toy.yaml:10: model.layers", mend=("!!set {1, 2}", "[1, 2]")),
    file("a key that is nothing", YAML + "? \n: 3\n", "toy.yaml:9:", mend=("? \n: 3\n", "seed: 3\n")),
    file("a key that is a number", YAML + "3: 4\n", "toy.yaml:9: 3: is no key", mend=("3: 4", "seed: 4")),
    # Too much
    file("an alias bomb", YAML + "model:\n" + BOMB, f"anchors bring more than {AGAIN:,} values again; write them once", mend=(BOMB, "  width: 8\n")),
    file("more values than any config has", YAML + MORE + f"layers: [{'1, ' * VALUES}1]\n", f"more than {VALUES:,} values; keep data in files of its own", mend=("1, " * VALUES, "")),
    file("a text of ten megabytes", YAML + MORE + f"title: {'x' * 10_000_000}\n", f"toy.yaml: more than {SIZE:,} bytes; keep data in files", mend=("x" * 10_000_000, "x")),
    file("brackets without end", YAML + MORE + f"layers: {'[' * 5000}\n", "values lie more than 50 deep in one another", mend=("[" * 5000, "[]")),
    file("braces without end", YAML + MORE + f"scales: {'{a: ' * 5000}\n", "values lie more than 50 deep in one another", mend=("{a: " * 5000, "{}")),
    file("a number that is no number of a machine", YAML + MORE + "scales: {a: 1e999}\n", "toy.yaml:10: model.scales.a: must be a number", mend=("1e999", "1e9")),
    # Bases
    file("a base that is no config", "base: /etc/hostname\n", "toy.yaml:1: base: must be a config (.yaml) by its place from this file's directory", mend=("/etc/hostname", "other.yaml")),
    file("a base by its place on the machine", "base: /other.yaml\n", "toy.yaml:1: base: must be a config (.yaml) by its place", mend=("/other.yaml", "other.yaml")),
    file("a base that is a folder", "base: ../configs\n", "toy.yaml:1: base: must be a config (.yaml)", mend=("../configs", "other.yaml")),
    file("a base from the network", "base: http://host/other.yaml\n", "toy.yaml:1: base:", "no such file", mend=("http://host/", "")),
    file("a base that is a number", "base: 3\n", "toy.yaml:1: base: must be the name of a file", mend=("base: 3", "base: other.yaml")),
    # Typed
    typed("optimizer.schedule.kind=cosin", "must be one of constant, cosine", "did you mean cosine?", mend="optimizer.schedule.kind=cosine"),
    typed("optimizer.schedule.warmup=-1", "must be a whole number at least 0, found -1", mend="optimizer.schedule={kind: cosine, warmup: 1}"),
    typed("model.layers.0=3", "model.layers", mend="model.layers=[3]"),
    typed("model.scales=3", "must be a mapping", "found 3", mend="model.scales={a: 3}"),
    typed("model.title=!!python/name:os.system x", "is no data", mend="model.title=x"),
    typed("model.__class__=3", "is no key of model", mend="model.width=8"),
    typed("__class__.__init__=3", "is no key", mend="seed=3"),
    typed("model.size=tiny", 'must be a whole number or auto, found the text "tiny"', mend="model.size=auto"),
    typed("checkpoint.evry=3", "is no key of checkpoint; it has every", "did you mean checkpoint.every?", mend="checkpoint.every=5"),
    typed("log.every=0", "log.every", "must be", mend="log.every=1"),
    typed("batch=3.0", "must be a whole number above 0, found 3.0; write 3", mend="batch=3"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name[:60] for case in CASES])
def test_a_mistake_is_told_and_following_the_advice_works(case: Case, path: Path, capsys):
    first.test_a_mistake_is_told_and_following_the_advice_works(case, path, capsys)


def test_the_corpus_is_as_large_as_the_page_says_and_has_none_twice():
    every = [*first.CASES, *CASES]
    assert len(every) >= 150
    page = Path(__file__).parents[2] / "docs/reliability.md"
    assert f"| {len(every)} | `tests/bad_input/test_configs.py`" in page.read_text()
    assert len({case.name for case in every}) == len(every)
    assert len({(case.file, case.typed) for case in every}) == len(every)


@pytest.mark.thorough
def test_each_message_names_its_place_and_is_told_soon(path: Path, capsys):
    """Check each case: a file and its line, or what was typed; within two seconds."""
    for case in [*first.CASES, *CASES]:
        write(path, case.file)
        begun = time.thread_time()
        assert main(["show", str(path), *case.typed]) == 2
        assert time.thread_time() - begun < 2, case.name
        lines = capsys.readouterr().err.splitlines()
        assert lines
        for line in lines:
            place = line.startswith(("command line: ", "default: ")) or ".yaml:" in line
            assert place, f"{case.name}: {line}"
            assert len(line) < 1000, f"{case.name}: {len(line)}"


def test_twelve_mistakes_are_told_together(path: Path, capsys):
    wrong = (
        "experiment: toy\nstpes: 10\nbatch: four\ncheckpoint:\n  evry: 5\n  keep: 0\noptimizer:\n"
        "  kind: adamw\nseed: -1\nname: a/b/c\nlog: {evry: 1}\nevaluate: {batch: -1, every: x}\n"
        "microbatches: 0\nmicrobatches: 2\n"
    )
    write(path, wrong)
    assert main(["show", str(path), "steps=none"]) == 2
    lines = capsys.readouterr().err.splitlines()
    places = [
        line.partition("toy.yaml:")[2].partition(":")[0] for line in lines if "toy.yaml:" in line
    ]
    assert [int(place) for place in places] == [2, 3, 5, 6, 9, 10, 11, 12, 12, 14]
    assert any(line.startswith("command line: steps=none") for line in lines)


@pytest.mark.thorough
def test_mistakes_of_the_first_stage_are_told_before_jax_is_imported(path: Path):
    """Eight interpreters; 0.2 s each on a quiet core, here with room for a busy one."""
    cases = [
        c
        for c in first.CASES
        if c.name
        in {
            "a misspelt top key",
            "a number in quotes",
            "a tab",
            "a key said twice",
            "an empty file",
            "no colon",
        }
    ]
    cases += [c for c in CASES if c.name in {"an alias bomb", "a text of ten megabytes"}]
    assert len(cases) == 8
    code = "import json, sys; from jtrain.cli import main; code = main(sys.argv[1:]); print(json.dumps([code, 'jax' in sys.modules, 'numpy' in sys.modules]))"
    for case in cases:
        write(path, case.file)
        begun = os.times()
        done = subprocess.run(
            [sys.executable, "-c", code, "show", str(path), *case.typed],
            capture_output=True,
            text=True,
            timeout=300,
        )
        spent = os.times()
        assert json.loads(done.stdout) == [2, False, False], case.name
        assert (
            spent.children_user
            + spent.children_system
            - begun.children_user
            - begun.children_system
            < 3
        )
        assert all(words in done.stderr for words in case.says)
