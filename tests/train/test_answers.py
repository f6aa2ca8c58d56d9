"""Generation: completions, texts while a model trains, and evaluation by answers to questions."""

import functools
import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_study import run_quietly
from tiny_configs import TINY, write_conversations

import jtrain as jt
from jtrain import Prompt
from jtrain.checkpoint import CheckpointManager
from jtrain.config.resolve import resolve
from jtrain.data import Arrays, Shuffled
from jtrain.data.text.chat_template import ChatTemplate
from jtrain.data.text.conversations import encode_conversation as encode
from jtrain.data.text.conversations import end_of_turn
from jtrain.data.text.tokenizers import ByteTokenizer
from jtrain.optim import SGD
from jtrain.train import answers
from jtrain.train.answers import (
    AnswerEvaluation,
    make_complete,
    make_question,
    same_number,
    same_text,
)
from jtrain.train.run_result import RunResult

pytestmark = pytest.mark.usefixtures("here")
CONFIG = Path(__file__).parents[2] / "configs" / "chat.yaml"
BYTES = ByteTokenizer()
STOP = tuple(end_of_turn(BYTES, ChatTemplate()).tolist())

TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and one?"},
    {"role": "assistant", "content": "5"},
]

text_of = lambda tokens: bytes(np.asarray(tokens, np.uint8)).decode()


def test_the_last_question_of_a_conversation_is_asked():
    question = make_question(encode(BYTES, ChatTemplate(), TALK), BYTES, STOP)
    assert question.answer == "5"
    assert text_of(question.prompt).endswith("and one?<|im_end|>\n<|im_start|>assistant\n")
    assert "4<|im_end|>" in text_of(question.prompt)


@pytest.mark.parametrize(
    ("answer", "expected", "text", "number"),
    [
        ("12", "12", 1, 1), ("It is 1,200.0 now", "1200", 0, 1), ("4", "-4", 0, 0),
        ("(5)-7", "7", 0, 1), ("(3,4)", "34", 0, 0), (".5", "5", 0, 0), ("1.5e-3", "0.0015", 0, 1),
        ("7\u22125", "5", 0, 1),  # the minus of typeset texts
    ],
)  # fmt: skip
def test_verifiers_are_functions_of_two_texts(answer, expected, text, number):
    assert (same_text(answer, expected), same_number(answer, expected)) == (text, number)


class Echo:
    """A model that answers a question with its params, whatever it reads; it never ends alone."""

    context = 256

    def __init__(self, begins):
        self.begins = begins

    def empty(self, params, rows):
        return jnp.zeros(rows, jnp.int32)

    def extend(self, params, cache, tokens, at):
        # The answer's next letter, from how many tokens ago the question began to be answered.
        newline = tokens[:, -1] == ord("\n")
        cache = jnp.where(newline, 0, cache + 1)
        return jax.nn.one_hot(params[jnp.minimum(cache, len(params) - 1)], 257), cache


def evaluation(talks, rows, tokens):
    questions = [make_question(encode(BYTES, ChatTemplate(), talk), BYTES, STOP) for talk in talks]
    how = {"questions": questions, "verify": same_text, "stop": STOP}
    how |= {"rows": rows, "tokens": tokens}
    return AnswerEvaluation(build=functools.partial(Echo, 0), tokenizer=BYTES, **how)


def talks():
    ask = lambda text, answer: [
        {"role": "user", "content": text},
        {"role": "assistant", "content": answer},
    ]
    return [ask("a" * n, "yes" if n % 3 else "no") for n in range(1, 8)]


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [3, 16])
def test_metrics_are_those_of_all_questions_in_any_batch(rows):
    said = jnp.asarray(np.frombuffer(b"yes" + bytes(STOP), np.uint8), jnp.int32)
    found = evaluation(talks(), rows, 20)(said, ())
    assert found == {"correct": 5 / 7, "finished": 1.0}


def config(folder: Path, *settings: str):
    path = write_conversations(folder / "chat.jsonl", 40)
    return resolve(CONFIG, [*TINY["chat"], f"data.path={path}", *settings]).config


@pytest.mark.thorough
def test_a_run_measures_its_answers_and_retains_the_best(tmp_path, monkeypatch):
    settings = [
        *("answers={verifier: same_text, tokens: 12, questions: 3, rows: 2}", "model.context=160"),
        *("steps=6", "optimizer.schedule.warmup=0", "evaluate.every=2", "checkpoint.every=2"),
        *("checkpoint.keep=1", "checkpoint.best=correct"),
        *("parallel={kind: fsdp, devices: 2, min_size: 0}", "lora={rank: 2, on: ['*kernel']}"),
    ]
    values, asked = config(tmp_path, *settings), itertools.count()
    accepts = lambda answer, expected: float(3 <= next(asked) < 6)  # the second evaluation is best
    monkeypatch.setitem(sys.modules[type(values).__module__].VERIFIERS, "same_text", accepts)
    outcome = run_quietly(values)
    rows = [json.loads(line) for line in outcome.directory.metrics.read_text().splitlines()]
    found = {row["step"]: row["valid/correct"] for row in rows if "valid/correct" in row}
    assert found == {2: 0, 4: 1, 6: 0}
    assert all(0 <= row.get("valid/finished", 0) <= 1 for row in rows)
    with CheckpointManager(outcome.directory.checkpoints) as checkpoints:
        assert checkpoints.steps() == [4, 6]
    again = jt.load(outcome.directory.path)
    assert again.experiment is not None
    generated = again.experiment.generated["valid"]
    assert generated.metrics == ("correct", "finished")
    assert generated(again.params, again.extra)["correct"] == 0


NO_MODEL: Any = None  # `generate` is replaced


@pytest.mark.parametrize(("stop", "text"), [("", "a.b.c.d"), ("c.", "a.b.c."), ("d.", "a.b.c.d")])
def test_a_continuation_ends_with_the_tokens_to_stop_at(stop: str, text: str, monkeypatch):
    bytes_of = ByteTokenizer()
    row = bytes_of.encode("a.b.c.d")[None]
    monkeypatch.setattr(answers, "generate", lambda *_, **__: row)
    encode = lambda prompt: bytes_of.encode(f"{prompt}.")
    complete = make_complete(lambda: NO_MODEL, bytes_of, encode=encode, stop=bytes_of.encode(stop))
    assert complete({}, (), jax.random.key(0), Prompt(text="a")) == text


SHOWN: list[tuple[int, Any]] = []


@jt.configclass
class Media(jt.trackers.TrackerConfig):
    def open(self, about: jt.trackers.TrackedRun) -> jt.trackers.TrackerRun:
        show = lambda step, shown: SHOWN.append((step, dict(shown)))
        return jt.trackers.TrackerRun("shown", lambda *row: None, lambda end: None, show)


@jt.configclass
class Config(jt.RunConfig):
    complete: bool = True
    own: bool = True

    def build(self, place):
        loss = lambda params, batch, rng: jt.Mean.of(params["w"] * batch["x"], batch["mask"])
        rest = {"complete": lambda params, extra, key, prompt: f"{prompt.text}{prompt.tokens}"}
        return jt.Experiment(
            init=lambda key: ({"w": jnp.float32(1)}, ()),
            loss=loss,
            train=Shuffled(Arrays(x=np.ones(16, np.float32)), size=8, seed=0),
            optimizer=self.optimizer,
            sample=(lambda params, extra, key: f"{float(params['w']):.1f}") if self.own else None,
            **(rest if self.complete else {}),
        )


def run(**values) -> RunResult:
    SHOWN.clear()
    given = {"experiment": "texts", "steps": 5, "batch": 8, "optimizer": SGD(lr=0.1)}
    return jt.run(Config(**given, trackers=(Media(),), **values), directory=Path("run"))


def test_texts_come_at_their_steps_and_at_the_end(caplog):
    with caplog.at_level(logging.INFO, "jtrain"):
        outcome = run(sample={"every": 2, "prompt": "to be ", "tokens": 9})
    assert [(step, {"sample": "to be 9"}) for step in (2, 4, 5)] == SHOWN
    assert outcome.sample == "to be 9"
    assert Path("run/samples.txt").read_text() == "to be 9\n"
    said = [x.message for x in caplog.records if x.message.startswith("sample after")]
    assert said == ["sample after step 2: to be 9", "sample after step 4: to be 9"]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"sample": {"every": 3}}, ["0.7", "0.5"]),
        pytest.param(
            {"sample": {"every": 3}, "own": False}, ["400", "400"], marks=pytest.mark.thorough
        ),
        pytest.param({}, ["0.5"], marks=pytest.mark.thorough),
        ({"own": False}, []),
    ],
)
def test_without_a_prompt_the_text_is_the_experiments_own(values, texts):
    run(**values)
    assert [shown["sample"] for _, shown in SHOWN] == texts
