"""Tasks of a language model: read, scored by choices and by what it writes, under any split."""

import importlib
import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.cli import main
from jtrain.errors import ConfigError, DataError
from jtrain.finetune.lora import adapted
from jtrain.parallel import FSDP, Single
from jtrain.train import evaluate_tasks, make_complete, read_tasks
from jtrain.train.loaded_run import LoadedRun

LETTERS = "\nabcdefgh "
TABLE = np.random.default_rng(0).normal(size=(len(LETTERS), len(LETTERS))).astype(np.float32)
LOG = TABLE - np.log(np.exp(TABLE).sum(-1, keepdims=True))
TASKS: list[dict[str, Any]] = [
    {"context": "ab", "choices": ["cd", "e", "fgh"], "answer": 1},
    {"context": "abc ", "choices": ["a", "bb"], "answer": "bb"},
    {"context": "", "choices": ["aa", "b"], "answer": 0},
]


class Letters:
    kind, end = "letters", None

    def __len__(self):
        return len(LETTERS)

    def encode(self, text, *, special=False):
        return np.array([LETTERS.index(x) for x in text], np.uint8)

    def decode(self, numbers):
        return "".join(LETTERS[n] for n in numbers)


def run_of(layout=Single(), **changes) -> LoadedRun:
    """A model of pairs of letters, as a loaded run."""
    model = jt.Model(lambda key: ({}, ()), lambda p, extra, tokens: (p["table"][tokens], extra))
    complete = make_complete(lambda: None, Letters())  # pyright: ignore[reportArgumentType]
    given = {"model": model, "complete": complete, **changes}
    strategy = layout.build()
    return LoadedRun(
        directory=Path(), step=1, params={"table": jnp.asarray(TABLE)}, extra=(), config=None,
        experiment=types.SimpleNamespace(**given), _program=None, _strategy=strategy,  # pyright: ignore
    )  # fmt: skip


def tasks_in(tmp_path: Path, *rows: Any):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in rows))
    return read_tasks(path)


def score(context: str, choice: str) -> float:
    """The sum over the letters after the context, whose last space belongs to the choice."""
    text, begin = (context or "\n") + choice, len(context.rstrip() or "\n")
    each = [LOG[LETTERS.index(a), LETTERS.index(b)] for a, b in itertools.pairwise(text)]
    return float(np.sum(each[begin - 1 :]))


@pytest.mark.parametrize("layout", [Single(), FSDP(devices=4, min_size=0)], ids=["1", "4"])
def test_choices_are_scored_as_by_hand_on_any_layout(layout, tmp_path):
    found = evaluate_tasks(run_of(layout), tasks_in(tmp_path, *TASKS), batch=4)
    each = [[score(t["context"], c) for c in t["choices"]] for t in TASKS]
    wanted = [1, 1, 0]
    right = np.mean([int(np.argmax(x)) == w for x, w in zip(each, wanted, strict=True)])
    sizes = [[len(c) for c in t["choices"]] for t in TASKS]
    norm = [np.argmax(np.divide(x, n)) == w for x, n, w in zip(each, sizes, wanted, strict=True)]
    assert found["tasks"] == 3
    assert found["accuracy"] == pytest.approx(right)
    assert found["accuracy_norm"] == pytest.approx(np.mean(norm))
    nats = -np.mean([x[w] for x, w in zip(each, wanted, strict=True)])
    assert found["nats"] == pytest.approx(nats, rel=1e-6)
    assert 0 <= found["accuracy_low"] <= right <= found["accuracy_high"] <= 1


def test_a_run_with_lora_takes_tasks_too(tmp_path):
    plain, tasks = run_of(), tasks_in(tmp_path, *TASKS)
    adapter: Any = types.SimpleNamespace()  # whose terms no choice asks for
    merged = adapted(adapter, plain.experiment.complete)  # pyright: ignore[reportOptionalMemberAccess]
    assert evaluate_tasks(run_of(complete=merged), tasks) == evaluate_tasks(plain, tasks)


def test_an_interval_is_wilsons(tmp_path):
    tasks = tasks_in(tmp_path, *[TASKS[0]] * 10)
    found = evaluate_tasks(run_of(), tasks)
    bounds = {0.0: (0.0, 0.2775), 1.0: (0.7225, 1.0)}[found["accuracy"]]
    assert [found["accuracy_low"], found["accuracy_high"]] == pytest.approx(bounds, abs=1e-4)


def test_what_is_written_is_cut_and_matched(tmp_path):
    write = lambda params, extra, key, prompt: f"{prompt.text} 12 apples\nand more"
    write.tokenizer = Letters()  # pyright: ignore[reportFunctionMemberAccess]
    rows = [
        {"context": "how many?", "answer": "12", "match": "number"},
        {"context": "how many?", "answer": "12 apples", "match": "text"},
        {"context": "how many?", "answer": "more", "match": "contains"},
        {"context": "how many?", "answer": "more", "match": "contains", "until": ""},
    ]
    found = evaluate_tasks(run_of(complete=write), tasks_in(tmp_path, *rows))
    assert found["match"] == 0.75


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2 of .* is no task"),
        ({"context": "a"}, "answer: Field required|answer: Missing required"),
        ({"context": "a", "answer": "b"}, 'give it either "choices", a list of texts'),
        ({"context": "a", "answer": "b", "choices": []}, 'give it either "choices"'),
        ({"context": "a", "answer": "b", "choices": ["c", "d"]}, "answer 'b' is to be one of two"),
        ({"context": "a", "answer": 2, "choices": ["c", "d"]}, "answer 2 is to be one of two"),
        ({"context": "a", "answer": 0, "choices": ["c", ""]}, "choices.1: String should have"),
        ({"context": "a", "answer": "b", "match": "numbr"}, "did you mean number"),
        ({"context": "a", "answer": "b", "choice": ["c"]}, "choice: .*did you mean choices"),
    ],
)
def test_what_is_no_task_is_named_by_its_line(row, said, tmp_path):
    with pytest.raises(DataError, match=said):
        tasks_in(tmp_path, TASKS[0], row)


def test_tasks_are_not_watched(capsys):
    assert main(["eval", "run", "--watch", "--tasks", "tasks.jsonl"]) == 2
    assert "Leave out --tasks" in capsys.readouterr().err


def test_without_lm_eval_its_adapter_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "jtrain.train.lm_harness", raising=False)
    with pytest.raises(DataError, match=r"pip install 'jtrain\[lm-eval\]'"):
        importlib.import_module("jtrain.train.lm_harness")


def test_a_run_without_a_language_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no language model to give tasks to"):
        evaluate_tasks(run_of(complete=None), tasks_in(tmp_path, *TASKS))
