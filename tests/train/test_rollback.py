"""A run that meets a bad step rolls back without its batch, stops, or skips the batch."""

import importlib
import json
import math
import os
import sys
import threading
from pathlib import Path

import pytest
from quick_study import At, run_quietly

import jtrain as jt
from chaos.numbers import Config, Fault, FiniteCheck, config, different
from jtrain.checkpoint import CheckpointManager, seal
from jtrain.config.sections import RollbackPolicy, Spike, StopPolicy
from jtrain.config.top import CheckpointConfig, LogConfig
from jtrain.distributed.launcher import launch
from jtrain.io import jsonl
from jtrain.train.hooks.bad_steps import BadSteps
from jtrain.train.program import set_up
from jtrain.train.rollback import _took, find_resume_point
from jtrain.train.save import CheckpointSaver

pytestmark = pytest.mark.usefixtures("here")


def ran(given: Config, name: str, *hooks: jt.Hook):
    return run_quietly(given, hooks, directory=Path("runs") / name)


def events(name: str) -> list[dict]:
    return jsonl.complete_rows(Path("runs") / name / "events.jsonl")


class KillError(Exception):
    """Ends a run where it stands."""


STORE = importlib.import_module("jtrain.train.run_store")
RUNS = ("went", "never")
NAN = Fault(batch=6, place="gradient up")


@pytest.mark.thorough
def test_a_rolled_back_run_ends_as_one_without_those_batches():
    went = config("went", (NAN,), RollbackPolicy(back=1, skip=3))
    clean = FiniteCheck()
    outcome = ran(went, "went", clean)
    assert (outcome.status, outcome.step) == ("done", 12)
    ran(config("never", (NAN,), RollbackPolicy(without=((5, 8),))), "never")
    assert different(Path("runs/went"), Path("runs/never")) == []
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


@pytest.mark.thorough
def test_several_steps_a_call_roll_back_too():
    settings = {"steps_per_call": "auto", "log": LogConfig(every=1)}
    went = config("went", (NAN,), RollbackPolicy(), **settings)
    schedule = set_up(went).schedule
    assert (schedule.longest, schedule.varies) == (4, True)
    assert ran(went, "went").status == "done"
    assert "resumes from step 4 of 12" in Path("runs/went/log.txt").read_text()
    ran(config("never", (NAN,), RollbackPolicy(without=((6, 7),)), **settings), "never")
    assert different(Path("runs/went"), Path("runs/never")) == []


@pytest.mark.thorough
def test_a_run_that_stops_names_step_and_rows_and_what_to_type():
    given = config("stops", (Fault(batch=6, place="the batch", row=3),), StopPolicy())
    outcome = ran(given, "stops")
    assert outcome.status == "failed"
    for part in (
        "step 7 is not finite: loss nan",
        "In the batch of step 7, row 3 of `fault` has nan",
        "It took batch 6. To go on without that batch: jtrain run runs/",
        "guard.without='[[6, 7]]'",
        "add --find-nan",
    ):
        assert part in outcome.why
    assert outcome.checkpoint == 4
    assert 7 < outcome.step <= 12
    (event,) = events("stops")
    assert (event["step"], event["done"], event["batch"]) == (7, "stopped", 6)
    assert ran(given, "stops").status == "failed"
    assert len(events("stops")) == 1, "the same event once"
    on = config("stops", given.data.faults, StopPolicy(without=((6, 7),)))
    assert ran(on, "stops").status == "done"
    ran(config("never", given.data.faults, StopPolicy(without=((6, 7),))), "never")
    assert different(Path("runs/stops"), Path("runs/never")) == []


@pytest.mark.parametrize(
    ("step", "known", "window", "has_taken"),
    [
        (9, [], (3, 5), True),
        (9, [], (9, 11), False),
        (10, [(10, 12)], (10, 15), False),  # of the window it knows a part, and has taken none
        (11, [(10, 12)], (10, 15), True),
    ],
)
def test_a_checkpoint_has_taken_a_batch_or_knew_that_it_is_left_out(step, known, window, has_taken):
    assert _took(step, known, [window]) == ([window] if has_taken else [])


def kill():
    raise KillError


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["decided", "removed"])
def test_killed_during_a_rollback_it_still_rolls_back(moment, monkeypatch):
    # Two batches before the bad one go too, so that the checkpoint after step 4 has taken one.
    guard = RollbackPolicy(back=3, skip=4)
    given = config("went", (NAN,), guard)
    with monkeypatch.context() as patch:
        if moment == "decided":
            patch.setattr(STORE, "find_resume_point", first_time_only(find_resume_point))
        if moment == "removed":
            remove = CheckpointManager.remove

            def removes(self, step):
                remove(self, step)
                kill()

            patch.setattr(CheckpointManager, "remove", removes)
        with pytest.raises(KillError):
            ran(given, "went")
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


@pytest.mark.thorough
def test_no_more_rollbacks_than_allowed():
    faults = tuple(Fault(batch=n, place="gradient up") for n in (2, 5, 8))
    outcome = ran(config("run", faults, RollbackPolicy(limit=2)), "run")
    assert outcome.status == "failed"
    assert (
        "was rolled back 2 times within 1000 steps (for 3, 5), and guard.limit is 2" in outcome.why
    )
    assert [e["done"] for e in events("run")] == ["rolled back", "rolled back", "stopped"]
    assert [e["batch"] for e in events("run")] == [2, 5, 8]
    assert ran(config("run", faults, RollbackPolicy(limit=3)), "run").status == "done"
    ran(config("never", faults, RollbackPolicy(without=((2, 3), (5, 6), (8, 9)))), "never")
    assert different(Path("runs/run"), Path("runs/never")) == []


@pytest.mark.thorough
def test_a_spike_rolls_back_too_also_in_a_run_that_was_stopped_in_between():
    big = Fault(batch=8, place="total of the loss", value="1e4")
    guard = RollbackPolicy(spike=Spike(loss=3.0, memory=4))
    given = config("went", (big,), guard)
    ran(given, "went", At(6, lambda: jt.Stop("enough")))
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
def test_nothing_later_than_a_bad_step_is_saved():
    # The spike is told of as the state after step 4 is about to be saved, in place of the only one.
    big = Fault(batch=2, place="total of the loss", value="1e4")
    given = config(
        "run",
        (big,),
        RollbackPolicy(spike=Spike(loss=3.0, memory=2), limit=0),
        checkpoint=CheckpointConfig(every=2, keep=1),
    )
    assert ran(given, "run").status == "failed"
    with CheckpointManager(Path("runs/run/checkpoints")) as checkpoints:
        assert checkpoints.steps() == [2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("guard", "status", "steps"),
    [(StopPolicy(), "failed", []), (RollbackPolicy(), "done", [8, 12])],
    ids=["stop", "rollback"],
)
def test_a_failed_save_changes_nothing_of_what_a_bad_step_does(guard, status, steps, monkeypatch):
    ended, failed, tried = threading.Event(), [], []
    judge_last, save, write_seal = BadSteps.stop_at_end, CheckpointSaver.__call__, seal.seal

    def judge_then_fail(bad_steps, step):
        stop = judge_last(bad_steps, step)
        ended.set()
        return stop

    def fail_once(*given):
        if failed:
            return write_seal(*given)
        failed.append(True)
        assert ended.wait(60)
        raise OSError(28, "No space left on device")

    def count(saver, step, state):
        tried.append(step)
        assert len(tried) < 9, "it tries for ever"
        return save(saver, step, state)

    monkeypatch.setattr(BadSteps, "stop_at_end", judge_then_fail)
    monkeypatch.setattr(seal, "seal", fail_once)
    monkeypatch.setattr(CheckpointSaver, "__call__", count)
    assert ran(config("run", (NAN,), guard), "run").status == status
    with CheckpointManager(Path("runs/run/checkpoints")) as checkpoints:
        assert checkpoints.steps() == steps


SCRIPT = Path(__file__).with_name("rollback_process.py")


@pytest.mark.thorough
def test_two_processes_decide_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SCRIPT.parent), *sys.path]))
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    assert launch(command, processes=2, devices=2) == 0
    ends = [json.loads(Path(f"ends-{index}.json").read_text()) for index in range(2)]
    assert ends[0] == ends[1]
    assert [end[:2] for end in ends[0].values()][:4] == [["done", 12]] * 4
    for went, never in (("nan", "no-nan"), ("spike", "no-spike")):
        assert different(Path("runs", went), Path("runs", never)) == []
        (event,) = jsonl.complete_rows(Path("runs", went, "events.jsonl"))
        assert event["done"] == "rolled back"
        assert len(event["rows"]) == 16, "of the whole batch"
    status, _, why = ends[0]["stops"]
    assert status == "failed"
    assert "is not finite" in why
