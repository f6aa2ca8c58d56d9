"""A profile of some steps of a run is written, read back and printed; it never ends a run."""

import io
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from quick_study import write_study

import jtrain as jt
from jtrain.cli import main
from jtrain.config.resolve import resolve
from jtrain.core.loop import StatelessHook, train_loop
from jtrain.errors import ConfigError
from jtrain.inspect.profile.read_trace import (
    Gap,
    Profile,
    _gaps,
    _merge,
    _Span,
)
from jtrain.inspect.profile.report import format_profile, load_profile
from jtrain.train.hooks import profile_window
from jtrain.train.hooks.profile_window import ProfileWindow, StepWindow


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_study(tmp_path)


def profiled(study: Path, window: str, *settings: str) -> tuple[ProfileWindow, list[str]]:
    """Train the study with a window, in its directory; return the hook and its lines."""
    config, lines = resolve(study, settings).config, []
    steps = StepWindow.parse(window)
    each = config.steps_divisor
    folder = Path("runs/quick/profile")
    hook = ProfileWindow(steps, folder, steps_per_call=each, log=lines.append)
    hook.finish(jt.run(config, hooks=[hook], screen=io.StringIO()).step)
    return hook, lines


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
    assert {"data", "hooks", "step"} <= set(found.phases)
    assert Path(found.trace).is_file()
    assert list(Path("runs/quick/profile").rglob("*.trace.json.gz"))
    assert main(["show", "quick", "--profile"]) == 0
    assert capsys.readouterr().out.strip() == format_profile(found)
    assert main(["show", "quick", "--profile", "--json"]) == 0
    assert Profile.from_plain(json.loads(capsys.readouterr().out)) == found


@pytest.mark.thorough
def test_operations_have_their_modules_and_collectives_their_share(study, capsys):
    split = "parallel={kind: fsdp, devices: 2, min_size: 0}"
    assert main(["run", str(study), "--profile", "3:8", split, "evaluate.every=0"]) == 0
    capsys.readouterr()
    found = load_profile(Path("runs/quick"))
    assert found.devices == 2
    assert 0 < found.collectives < 1
    assert "optimizer" in {op.module for op in found.operations}


@pytest.mark.parametrize(
    ("window", "advice"),
    [
        ("10:5", "--profile 5:10"),
        ("1:5", "--profile 2:5"),
        ("5:1", "--profile 2:5"),
        ("ten", "--profile 10:15"),
        ("10:15", "--profile 7:12"),
    ],
)
def test_windows_that_do_not_fit_say_which_does(study, capsys, window, advice):
    assert main(["run", str(study), "--profile", window]) == 2
    assert advice in capsys.readouterr().err
    good = advice.partition(" ")[2]
    if good != "10:15":  # the run has 12 steps
        StepWindow.parse(good).check_steps(12)


def test_it_excludes_debug_modes(study, capsys):
    assert main(["run", str(study), "--profile", "4:6", "--fast"]) == 2
    assert "--fast and --profile exclude each other" in capsys.readouterr().err


def test_without_room_the_run_goes_on(study, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    hook, lines = profiled(study, "4:6", "evaluate.every=0")
    assert hook.traced is None
    (line,) = lines
    assert "1.00MB are free" in line
    assert "The run goes on without it." in line


@pytest.mark.thorough
def test_a_profiler_that_fails_does_not_end_the_run(study, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(profile_window.jax.profiler, "start_trace", fail)
    hook, lines = profiled(study, "4:6", "evaluate.every=0")
    assert hook.traced is None
    (line,) = lines
    assert line.startswith("no profile of steps 4:6: Only one profile may be run at a time.")
    assert line.endswith("The run goes on without it.")


@pytest.mark.thorough
def test_a_run_resumed_after_the_window_says_so(study):
    profiled(study, "2:3", "steps=8", "evaluate.every=0")
    hook, lines = profiled(study, "4:6", "steps=12", "evaluate.every=0")
    assert hook.traced is None
    assert lines == ["no profile: the run resumed after steps 4:6"]


@pytest.mark.thorough
def test_a_run_that_ends_before_the_window_says_so(study):
    hook, lines = profiled(study, "10:15", "steps=8", "evaluate.every=0")
    assert hook.traced is None
    assert lines == ["no profile: the run ended at step 8, before steps 10:15"]


@pytest.mark.thorough
def test_a_finished_run_says_so(study):
    profiled(study, "4:6", "steps=8", "evaluate.every=0")
    _, lines = profiled(study, "4:6", "steps=8", "evaluate.every=0")
    assert lines == ["no profile: the run had taken steps 4:6 before"]


@pytest.mark.thorough
def test_several_steps_a_call_are_traced_by_calls(study):
    settings = ["steps_per_call=3", "checkpoint.every=6", "evaluate.every=0"]
    hook, lines = profiled(study, "5:8", *settings)
    assert (hook.traced, lines) == ((4, 9), [])


@pytest.mark.parametrize(
    ("each", "turns"), [(1, [3, 6]), (3, [3, 6]), (4, [4, 8])], ids=["1", "3", "4"]
)
def test_steps_in_flight_are_reported_before_the_trace_begins_and_ends(tmp_path, each, turns):
    """Reported later they would seem to take no time: a median of 3 ms for steps of 73."""
    done, late = [0], {}

    class Clock(StatelessHook):
        every = each

        def on_done(self, step):
            done.append(step)

        def on_state(self, step, state, metrics):
            late[step] = step - done[-1]

    hook = ProfileWindow(StepWindow(4, 6), tmp_path, steps_per_call=each)
    hook._start = lambda step, metrics: setattr(hook, "_first", step + 1)
    hook._stop = lambda step, metrics: vars(hook).update(_first=0, _over=True)
    ones = jnp.ones(each if each > 1 else ())
    metrics = {"loss": jt.Mean(ones, ones)}
    step = lambda state, batch: (state, metrics)
    options = {"start": 0, "stop": 6 * each, "steps_per_call": each}
    train_loop(step, 0, [{}] * 6, hooks=[hook, Clock()], **options)
    assert [step for step, steps in late.items() if not steps] == turns


def test_steps_in_flight_are_reported_where_calls_have_different_lengths(study):
    done, late = [0], {}

    class Clock(StatelessHook):
        call_ends = ()  # adds none

        def on_done(self, step):
            done.append(step)

        def on_state(self, step, state, metrics):
            late[step] = step - done[-1]

    config = resolve(study, ["evaluate.every=0", "checkpoint.every=0"]).config
    hook = ProfileWindow(StepWindow(4, 6), Path("trace"))
    hook._start = lambda step, metrics: setattr(hook, "_first", step + 1)
    hook._stop = lambda step, metrics: vars(hook).update(_first=0, _over=True)
    jt.run(config, hooks=[hook, Clock()], screen=io.StringIO())
    assert (late[3], late[6]) == (0, 0)


def test_gaps_are_what_no_operation_covers():
    busy = [_Span(1.0, 2.0, "a"), _Span(1.5, 2.5, "b"), _Span(4.0, 5.0, "c")]
    merged = _merge(busy)
    assert [(s.start, s.end) for s in merged] == [(1.0, 2.5), (4.0, 5.0)]
    assert [(s.start, s.end) for s in _gaps(merged, 0.0, 6.0)] == [
        (0.0, 1.0),
        (2.5, 4.0),
        (5.0, 6.0),
    ]


def test_a_profile_without_operations_says_so():
    empty = Profile(2, 3, 1.0, 0, 0.0, (), 0.0, {}, (Gap(0.0, 1.0, 2, "data"),), {}, "x.pb", 10)
    text = format_profile(empty)
    assert "no operation of a device" in text
    assert "waited for a batch" in text


@pytest.mark.thorough
def test_a_damaged_summary_says_what_to_do(study, capsys):
    assert main(["run", str(study), "steps=4", "evaluate.every=0"]) == 0
    capsys.readouterr()
    assert main(["show", "quick", "--profile"]) == 2
    assert "--profile" in capsys.readouterr().err
    Path("runs/quick/profile.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(Path("runs/quick"))
