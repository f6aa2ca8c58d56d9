"""Texts that a model writes while it trains: `sample={every: 2, prompt: ...}`."""

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.data import Arrays, Shuffled
from jtrain.optim import SGD
from jtrain.train.run_result import RunResult

pytestmark = pytest.mark.usefixtures("here")
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
        ({"sample": {"every": 3}, "own": False}, ["400", "400"]),
        ({}, ["0.5"]),
        ({"own": False}, []),
    ],
)
def test_without_a_prompt_the_text_is_the_experiments_own(values, texts):
    run(**values)
    assert [shown["sample"] for _, shown in SHOWN] == texts
