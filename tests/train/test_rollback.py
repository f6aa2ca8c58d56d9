"""A run that meets a bad step rolls back without its batch, stops, or skips the batch."""

import importlib
import json
import math
import os
from pathlib import Path

import pytest
from cases import by_name

import jtrain as jt
from chaos.numbers import Config, Fault, FiniteCheck, config, different
from jtrain.checkpoint import CheckpointManager
from jtrain.config.guard import RollbackPolicy, SkipPolicy, Spike, StopPolicy
from jtrain.config.precision import F16
from jtrain.config.top import CheckpointConfig, LogConfig
from jtrain.core.loop import Rollback
from jtrain.errors import ConfigError
from jtrain.io import jsonl
from jtrain.optim import SGD
from jtrain.train.rollback import _took, resume_point
from jtrain.train.run_hooks import open_hooks
from jtrain.train.setup import set_up


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)


def ran(given: Config, name: str, *hooks: jt.Hook):
    with open(os.devnull, "w") as nowhere:
        return jt.run(given, hooks=hooks, screen=nowhere, directory=Path("runs") / name)


def events(name: str) -> list[dict]:
    return jsonl.complete_rows(Path("runs") / name / "events.jsonl")


class KillError(Exception):
    """Ends a run where it stands."""


STORE = importlib.import_module("jtrain.train.run_store")
TO_END = importlib.import_module("jtrain.train.train_to_end")
RUNS = ("went", "never")
NAN = Fault(batch=6, place="gradient up")


def test_a_rolled_back_run_ends_as_one_without_those_batches():
    went = config("went", (NAN,), RollbackPolicy(back=1, skip=3))
    clean = FiniteCheck()
    outcome = ran(went, "went", clean)
    assert (outcome.status, outcome.step) == ("done", 12)
    ran(config("never", (NAN,), RollbackPolicy(without=((5, 8),))), "never")
    ran(config("skips", (NAN,)), "skips")
    assert different(Path("runs/went"), Path("runs/never")) == []
    assert different(Path("runs/went"), Path("runs/skips"))
    assert clean.found == []
    assert clean.states > 12
    (event,) = events("went")
    assert (event["step"], event["batch"], event["done"]) == (7, 6, "rolled back")
    assert event["without"] == [5, 8]
    assert len(event["rows"]) == 16
    assert math.isfinite(event["loss"])
    assert event["grad_norm"] == "NaN"
    with CheckpointManager(Path("runs/went/checkpoints")) as checkpoints:
        assert checkpoints.about(12)["without"] == [[5, 8]]
    log = Path("runs/went/log.txt").read_text()
    assert "Rolling back; batches 5 to 7 are skipped." in log
    assert "resumes from step 4 of 12" in log
    assert events("never") == []


@pytest.mark.parametrize("calls", [pytest.param(4, marks=pytest.mark.thorough), "auto"])
def test_several_steps_a_call_roll_back_too(calls):
    settings = {"steps_per_call": calls, "log": LogConfig(every=1)}
    went = config("went", (NAN,), RollbackPolicy(), **settings)
    schedule = set_up(went).schedule
    assert (schedule.most, schedule.varies) == (4, calls == "auto")
    assert ran(went, "went").status == "done"
    assert "resumes from step 4 of 12" in Path("runs/went/log.txt").read_text()
    ran(config("never", (NAN,), RollbackPolicy(without=((6, 7),)), **settings), "never")
    assert different(Path("runs/went"), Path("runs/never")) == []


@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_call", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_skipped_step_is_an_event_with_its_data(steps_per_call):
    faults = (NAN, Fault(batch=9, place="total of the loss", value="inf"))
    given = config("skips", faults, log=LogConfig(every=4), steps_per_call=steps_per_call)
    assert ran(given, "skips").status == "done"
    found = [(e["step"], e["batch"], e["done"], e["loss"]) for e in events("skips")]
    assert [each[:3] for each in found] == [(7, 6, "skipped"), (10, 9, "skipped")]
    assert found[1][3] == "Infinity"


@pytest.mark.thorough
def test_too_many_skipped_steps_stop_the_run():
    faults = tuple(Fault(batch=n, place="gradient up") for n in (1, 4, 6, 7))
    given = config("skips", faults, SkipPolicy(most=3, within=4), log=LogConfig(every=2))
    outcome = ran(given, "skips")
    assert outcome.status == "failed"
    assert "3 steps within 4 were skipped, and guard.most is 3: step 8" in outcome.why


@pytest.mark.thorough
def test_a_run_that_stops_names_step_rows_and_leaf_and_what_to_type():
    given = config("stops", (Fault(batch=6, place="the batch", row=3),), StopPolicy())
    outcome = ran(given, "stops")
    assert outcome.status == "failed"
    for part in (
        "step 7 is not finite: loss nan",
        "In the batch of step 7, row 3 of `fault` has nan",
        "The numbers of a step are read up to 2 calls late: it was found at step 8.",
        "It took batch 6; of its gradient at the parameters after step 8, leaf by leaf, 3 of 3 "
        "are not finite, the first of them",
        "guard.without='[[6, 7]]'",
    ):
        assert part in outcome.why
    assert (outcome.step, outcome.checkpoint) == (8, 4)
    (event,) = events("stops")
    assert (event["step"], event["done"], event["batch"]) == (7, "stopped", 6)
    assert ran(given, "stops").status == "failed"
    assert len(events("stops")) == 1, "the same event once"
    on = config("stops", given.data.faults, StopPolicy(without=((6, 7),)))
    assert ran(on, "stops").status == "done"
    ran(config("never", given.data.faults, StopPolicy(without=((6, 7),))), "never")
    assert different(Path("runs/stops"), Path("runs/never")) == []


@pytest.mark.thorough
def test_a_leaf_alone_is_named():
    outcome = ran(config("stops", (NAN,), StopPolicy()), "stops")
    assert "1 of 3 are not finite, the first of them up." in outcome.why


@pytest.mark.thorough
def test_batches_that_were_taken_cannot_be_skipped_any_more():
    given = config("run")
    ran(given, "run", At(9, lambda: jt.Stop("enough")))
    with pytest.raises(ConfigError, match=r"\[3, 5\], and checkpoint 9 .*jtrain ckpt rm"):
        ran(config("run", (), SkipPolicy(without=((3, 5),))), "run")
    assert ran(config("run", (), SkipPolicy(without=((9, 11),))), "run").status == "done"
    ran(config("never", (), SkipPolicy(without=((9, 11),))), "never")
    assert different(Path("runs/run"), Path("runs/never")) == []


@pytest.mark.parametrize(
    ("step", "known", "window", "has_taken"),
    [
        (9, [], (3, 5), True),
        (9, [], (9, 11), False),
        (10, [(10, 12)], (10, 15), False),  # of the window it knows a part, and has taken none
        (11, [(10, 12)], (10, 15), True),
        (9, [(3, 5)], (3, 5), False),
        (9, [(3, 5)], (3, 6), True),
    ],
)
def test_a_checkpoint_has_taken_a_batch_or_knew_that_it_is_left_out(
    step: int, known: list, window: tuple[int, int], has_taken: bool
):
    assert _took(step, known, [window]) == ([window] if has_taken else [])


class At(jt.Hook):
    """Does something after a step, the first time."""

    def __init__(self, step: int, act):
        self._step, self._act = step, act

    def on_state(self, step, state, metrics):
        if step != self._step:
            return None
        self._step = 0
        return self._act()


def kill():
    raise KillError


MOMENTS = {moment: moment for moment in ("decided", "removed", "restored", "a step later")}


@pytest.mark.thorough
@pytest.mark.parametrize("moment", by_name(MOMENTS, ["removed"], pytest.mark.slow))
def test_killed_during_a_rollback_it_still_rolls_back(moment, monkeypatch):
    # Two batches before the bad one go too, so that the checkpoint after step 4 has taken one.
    guard = RollbackPolicy(back=3, skip=4)
    given = config("went", (NAN,), guard)
    with monkeypatch.context() as patch:
        if moment == "decided":
            patch.setattr(STORE, "resume_point", first_time_only(resume_point))
        if moment == "removed":
            remove = CheckpointManager.remove

            def removes(self, step):
                remove(self, step)
                kill()

            patch.setattr(CheckpointManager, "remove", removes)
        if moment == "restored":
            patch.setattr(TO_END, "open_hooks", first_time_only(open_hooks))
        hooks = [Twice(2)] if moment == "a step later" else []
        with pytest.raises(KillError):
            ran(given, "went", *hooks)
    assert ran(given, "went").status == "done"
    ran(config("never", (NAN,), RollbackPolicy(without=((3, 7),))), "never")
    assert different(Path("runs/went"), Path("runs/never")) == []
    assert [e["done"] for e in events("went")] == ["rolled back"]


def first_time_only(function):
    called = []

    def call(*args, **more):
        called.append(args)
        if len(called) > 1:
            kill()
        return function(*args, **more)

    return call


class Twice(jt.Hook):
    """Kills when a step comes the second time."""

    def __init__(self, step: int):
        self._step, self._seen = step, 0

    def on_state(self, step, state, metrics):
        self._seen += step == self._step
        if self._seen > 1:
            kill()


@pytest.mark.thorough
def test_no_more_rollbacks_than_allowed():
    faults = tuple(Fault(batch=n, place="gradient up") for n in (2, 5, 8))
    outcome = ran(config("run", faults, RollbackPolicy(most=2)), "run")
    assert outcome.status == "failed"
    assert (
        "was rolled back 2 times within 1000 steps (for 3, 5), and guard.most is 2" in outcome.why
    )
    assert [e["done"] for e in events("run")] == ["rolled back", "rolled back", "stopped"]
    assert [e["batch"] for e in events("run")] == [2, 5, 8]
    assert ran(config("run", faults, RollbackPolicy(most=3)), "run").status == "done"
    ran(config("never", faults, RollbackPolicy(without=((2, 3), (5, 6), (8, 9)))), "never")
    assert different(Path("runs/run"), Path("runs/never")) == []


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [pytest.param(None, marks=pytest.mark.slow), 6])
def test_a_spike_rolls_back_too_also_in_a_run_that_was_stopped_in_between(broken):
    big = Fault(batch=8, place="total of the loss", value="1e4")
    guard = RollbackPolicy(spike=Spike(loss=3.0, memory=4))
    given = config("went", (big,), guard)
    if broken:
        ran(given, "went", At(broken, lambda: jt.Stop("enough")))
    assert ran(given, "went").status == "done"
    (event,) = events("went")
    assert (event["step"], event["done"]) == (9, "rolled back")
    assert "is a spike: loss" in event["what"]
    ran(config("never", (big,), RollbackPolicy(spike=guard.spike, without=((8, 9),))), "never")
    assert different(Path("runs/went"), Path("runs/never")) == []
    known = [CheckpointManager(Path(f"runs/{n}/checkpoints")).about(12)["guard"] for n in RUNS]
    assert known[0] == known[1]
    assert known[0]["steps"] == 12


@pytest.mark.thorough
def test_a_hook_of_ones_own_may_ask_for_a_rollback():
    asked = At(6, lambda: Rollback("too proud", step=6, back=1, skip=2))
    assert ran(config("went"), "went", asked).status == "done"
    ran(config("never", (), SkipPolicy(without=((4, 6),))), "never")
    assert different(Path("runs/went"), Path("runs/never")) == []
    (event,) = events("went")
    assert (event["step"], event["what"]) == (6, "too proud")


def test_nothing_later_than_a_bad_step_is_saved():
    # The spike is told of as the state after step 4 is about to be saved, in place of the only one.
    big = Fault(batch=2, place="total of the loss", value="1e4")
    given = config(
        "run",
        (big,),
        RollbackPolicy(spike=Spike(loss=3.0, memory=2), most=0),
        checkpoint=CheckpointConfig(every=2, keep=1),
    )
    assert ran(given, "run").status == "failed"
    with CheckpointManager(Path("runs/run/checkpoints")) as checkpoints:
        assert checkpoints.steps() == [2]


@pytest.mark.thorough
def test_an_overflow_of_float16_is_no_bad_step():
    given = config(
        "run",
        (),
        RollbackPolicy(),
        precision=F16(initial=2.0**30, minimum=1.0),
        optimizer=SGD(lr=0.1),
    )
    assert ran(given, "run").status == "done"
    assert events("run") == []
    text = Path("runs/run/metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[-1])["skipped"] > 0
