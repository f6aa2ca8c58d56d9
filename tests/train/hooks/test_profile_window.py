"""A profile of some steps of a run is written, read back and printed; it never ends a run."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from quick_study import write_study

import jtrain as jt
from jtrain.cli import main
from jtrain.core.loop import train_loop
from jtrain.inspect.profile import Profile, format_profile, load_profile
from jtrain.train.hooks.function_hooks import on_numbers
from jtrain.train.hooks.profile_window import ProfileWindow, StepWindow


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_study(tmp_path)


@pytest.mark.thorough
def test_a_run_writes_a_trace_and_reads_it_back(study, capsys):
    assert main(["run", str(study), "--profile", "4:6", "evaluate.every=5"]) == 0
    shown = capsys.readouterr().out
    assert "profile of steps 4 to 6" in shown
    assert "https://ui.perfetto.dev" in shown
    assert "xprof --logdir runs/quick/profile" in shown
    found = load_profile(Path("runs/quick"))
    assert (found.first, found.last, found.devices) == (4, 6, 1)
    assert 0 < found.busy < 1
    assert found.collectives == 0
    assert found.operations
    assert sum(op.seconds for op in found.operations) > 0
    # An evaluation ran inside the window, and took most of the host's time in it.
    assert found.phases["eval"] > 0
    assert {"data", "step"} <= set(found.phases)
    assert Path(found.trace).is_file()
    assert list(Path("runs/quick/profile").rglob("*.trace.json.gz"))
    assert main(["show", "quick", "--profile"]) == 0
    assert capsys.readouterr().out.strip() == format_profile(found)
    assert main(["show", "quick", "--profile", "--json"]) == 0
    assert Profile.from_plain(json.loads(capsys.readouterr().out)) == found


@pytest.mark.parametrize(("each", "turns"), [(1, [3, 6]), (4, [4, 8])], ids=["1", "4"])
def test_the_trace_begins_and_ends_where_no_step_is_in_flight(tmp_path, each, turns):
    """Steps that are reported later would seem to take no time: a median of 3 ms for 73."""
    hook, shown, told = ProfileWindow(StepWindow(4, 6), tmp_path, steps_per_call=each), [], []
    hook._start = lambda: shown.append(told[-1])
    hook._stop = lambda step: shown.append(told[-1])
    step = hook.wrap(lambda state, batch: (state, metrics), lambda step: step + each, 0)
    ones = jnp.ones(each if each > 1 else ())
    metrics = {"loss": jt.Mean(ones, ones)}
    listens = on_numbers(lambda step, numbers: told.append(step))
    begin = hook.on_state

    def on_state(step, state):
        begin(step, state)
        hook._traces = True

    hook.on_state = on_state
    options = {"start": 0, "stop": 6 * each, "steps_per_call": each}
    train_loop(step, 0, [{}] * 6, hooks=[listens, hook], **options)
    assert shown == turns
