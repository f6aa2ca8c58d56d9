"""The cadence of the log changes nothing about the bad steps of a run."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import by_name

import jtrain as jt
from chaos.numbers import Fault, config, different
from jtrain.config.guard import SkipPolicy
from jtrain.config.top import CheckpointConfig, LogConfig
from jtrain.errors import LossError
from jtrain.io import jsonl


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)


STEPS = 24
CADENCES = (1, 10, 1000)
GUARDS: dict[str, tuple[tuple[int, ...], SkipPolicy, str]] = {
    "three bad batches": ((0, 7, 15), SkipPolicy(), "done"),
    "the first four": (range(4), SkipPolicy(window=5), "done"),
    "six in a row": (range(9, 15), SkipPolicy(window=6), "failed"),
    "all but the first": (range(1, STEPS), SkipPolicy(), "failed"),  # the data is not finite
    "all": (range(STEPS), SkipPolicy(), "failed"),
    "more than are allowed": ((3, 4, 9), SkipPolicy(most=3, within=8), "failed"),
}
QUICK = ("three bad batches", "six in a row")


def ended(name: str, bad, guard: SkipPolicy, **settings: Any) -> tuple[Any, ...]:
    """Return how a run ended: its status, last step, reason, and events."""
    faults = tuple(Fault(batch=number, place="gradient up") for number in bad)
    given = dataclasses.replace(config(name, faults, guard, **settings), steps=STEPS)
    with open(os.devnull, "w") as nowhere:
        outcome = jt.run(given, screen=nowhere, directory=Path("runs") / name)
    found = jsonl.complete_rows(Path("runs") / name / "events.jsonl")
    events = [(row["step"], row["batch"], row["done"]) for row in found]
    return outcome.status, outcome.step, outcome.why.replace(name, "NAME"), events


@pytest.mark.thorough
@pytest.mark.parametrize("calls", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", by_name(GUARDS, QUICK, pytest.mark.slow))
def test_a_config_ends_the_same_at_every_cadence_of_the_log(case, calls):
    bad, guard, status = case
    settings = {"steps_per_call": calls, "checkpoint": CheckpointConfig(every=0)}
    each = [ended(f"log-{n}", bad, guard, log=LogConfig(every=n), **settings) for n in CADENCES]
    assert each[0][0] == status
    assert each[0] == each[1] == each[2]
    assert [event[0] for event in each[0][3]] == [n + 1 for n in bad if n < each[0][1]]
    states = [different(Path("runs/log-1"), Path(f"runs/log-{n}")) for n in CADENCES[1:]]
    assert states == [["metrics.jsonl differs"]] * 2, "what is logged, and nothing else"


X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
Y = X @ np.float32([1, 2, 3])


def loss(params, batch, rng):
    del rng
    error = batch["x"] @ params["w"] - batch["y"]
    return jt.Mean.of(error**2, batch["mask"])


WITH_NAN = np.where(np.arange(48) == 7, np.nan, Y).astype(np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("every", [0, 1, 1000])
@pytest.mark.parametrize(("steps", "batch"), [(3, 16), (7, 16), (49, 3)])
def test_a_short_fit_does_not_die_of_its_first_nan(steps, batch, every):
    call = {"batch": batch, "every": every, "quiet": True, "parallel": "single"}
    result = jt.fit(loss, {"w": np.zeros(3, np.float32)}, (X, WITH_NAN), steps=steps, **call)
    epochs = -(-steps * batch // 48)  # the row comes once in each
    assert (result.step, int(result.state.skipped)) in ((steps, epochs), (steps, epochs - 1))
    assert np.isfinite(np.asarray(result.params["w"])).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("every", [1, 7, 1000])
def test_where_rows_that_are_no_numbers_end_a_run_is_no_matter_of_the_log(every):
    call = {"batch": 16, "every": every, "quiet": True, "parallel": "single"}
    with pytest.raises(LossError, match=r"^6 of 20 steps were skipped because the data is not fin"):
        jt.fit(loss, {"w": np.zeros(3, np.float32)}, (X, WITH_NAN), steps=49, **call)


def test_an_interruption_does_not_move_it():
    settings = {"every": 5, "checkpoint_every": 4, "batch": 16, "name": "cut", "quiet": True}
    stopping = lambda step, numbers: jt.Stop("enough") if step == 13 else None
    call = {"steps": 49, "parallel": "single", **settings}
    start = {"w": np.zeros(3, np.float32)}
    assert jt.fit(loss, start, (X, WITH_NAN), hooks=[stopping], **call).step >= 13
    with pytest.raises(LossError, match=r"^6 of 20 steps were skipped because the data is not fin"):
        jt.fit(loss, start, (X, WITH_NAN), **call)
