"""The speed of a run, its memory, and where its time went."""

import itertools
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.cli import main
from jtrain.core.loop import FinishedSteps, train_loop
from jtrain.core.mean import Mean
from jtrain.inspect.ledger import format_ledger, make_ledger, read_ledger
from jtrain.inspect.profile import Profile, format_profile, load_profile
from jtrain.io.jsonl import JsonlWriter
from jtrain.train.hooks import Speed
from jtrain.train.hooks.function_hooks import on_numbers
from jtrain.train.hooks.profile_window import ProfileWindow, StepWindow
from jtrain.train.hooks.speed import MemoryUse, measure_memory


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def each_step(amount):
    return lambda step: amount * step


def speed_of(clock, **more):
    given = {"every": 2, "stop": 100, "rows": each_step(8), "clock": clock, **more}
    return Speed(None, **given)


def train(speed, clock, first, last, *, seconds, each=1):
    """Report calls of steps that take `seconds` each, as the loop does."""
    for step in range(first, last + 1, each):
        clock.now += each * seconds
        end = step + each - 1
        speed.on_steps(FinishedSteps(range(step, end + 1), {}, [(end, clock.now)]))
        if end % speed.every == 0:
            speed.on_numbers(end, {})


def test_steps_are_timed_without_the_first_call():
    clock = Clock()
    speed = speed_of(clock, tokens=each_step(512))
    clock.now += 60  # compiling
    train(speed, clock, 1, 1, seconds=0.5)
    assert speed.pace is None
    train(speed, clock, 2, 10, seconds=0.5)
    assert speed.pace is not None
    assert speed.pace.step == 10
    assert speed.pace.seconds_per_step == pytest.approx(0.5)
    assert speed.pace.rows_per_second == pytest.approx(16)
    assert speed.pace.tokens_per_second == pytest.approx(1024)
    assert speed.pace.left == pytest.approx(45)


def test_a_pause_is_no_time_of_a_step_but_counts_for_what_is_left():
    clock = Clock()
    speed = speed_of(clock)
    train(speed, clock, 1, 11, seconds=0.5)
    with speed.pause():
        clock.now += 20
        with speed.pause():  # one in another counts once
            clock.now += 10
    train(speed, clock, 12, 21, seconds=0.5)
    assert speed.pace is not None
    assert speed.pace.seconds_per_step == pytest.approx(0.5)
    assert speed.paused == 30
    assert speed.pace.left == pytest.approx(80 * (0.5 + 30 / 19))


def test_utilization_is_work_by_time_and_peak(tmp_path):
    clock = Clock()
    work = {"flops": (each_step(3e12), each_step(4e12)), "peak": 1e13}
    file = JsonlWriter(tmp_path / "s")
    speed = Speed(file, every=2, stop=100, rows=each_step(8), clock=clock, **work)
    train(speed, clock, 1, 11, seconds=0.5)
    assert speed.pace is not None
    assert (speed.pace.mfu, speed.pace.hfu) == pytest.approx((0.6, 0.8))
    file.close()
    assert json.loads((tmp_path / "s").read_text().splitlines()[-1])["mfu"] == pytest.approx(0.6)


def test_quantiles_leave_out_pauses_and_the_first_call():
    clock = Clock()
    speed = speed_of(clock, every=4)
    clock.now += 60
    train(speed, clock, 1, 200, seconds=0.5, each=4)
    with speed.pause():
        clock.now += 30
    train(speed, clock, 201, 400, seconds=0.5, each=4)
    assert speed.pace is not None
    assert speed.pace.p50 == speed.pace.p90 == pytest.approx(0.5)


def test_a_step_is_timed_when_it_is_done():
    """A call that returns at once and takes 20 ms has a p50 of 20 ms, or of what it really took."""
    ended = []

    def slow(x):
        time.sleep(0.02)
        ended.append(time.perf_counter())
        return x

    def step(state, batch):
        out = jax.pure_callback(slow, jax.ShapeDtypeStruct((), "float32"), batch["x"])
        return state, {"loss": Mean(out, jax.numpy.float32(1))}

    compiled = jax.jit(step)
    feed = [{"x": jax.device_put(np.float32(i))} for i in range(24)]
    speed = Speed(None, every=4, stop=24, rows=each_step(1))
    zero, watch = jax.device_put(np.float32(0)), {"hooks": [speed], "recorders": [speed]}
    train_loop(compiled, zero, feed, start=0, stop=24, **watch)
    assert speed.pace is not None
    assert speed.pace.p50 is not None
    took = statistics.median(end - before for before, end in itertools.pairwise(ended))
    assert 0.02 <= speed.pace.p50 < 2 * took


def test_memory_is_the_fullest_device_or_the_process():
    class Device:
        def __init__(self, used, peak):
            self._stats = {"bytes_in_use": used, "peak_bytes_in_use": peak}

        def memory_stats(self):
            return self._stats

    assert measure_memory([Device(3, 9), Device(5, 7)]) == MemoryUse(5, 9, "device")
    process = measure_memory(jax.devices("cpu"))
    assert process.of == "process"
    assert 50e6 < process.in_use <= process.peak
    held = np.ones(25_000_000)  # 200 MB
    assert measure_memory(jax.devices("cpu")).in_use > process.in_use + held.nbytes / 2


def row(step, seconds, /, *, began=100.0, resumed=False, **phases):
    assert sum(phases.values()) == pytest.approx(seconds)
    made = {"step": step, "began": began, "seconds": seconds, "phases": phases}
    return made | ({"resumed": True} if resumed else {})


def test_a_killed_attempt_lost_its_steps_after_the_checkpoint():
    ledger = make_ledger(
        [
            row(0, 5.0, resumed=True, start=5.0),
            row(10, 15.0, start=5.0, step=10.0),
            row(20, 25.0, start=5.0, step=20.0),  # killed at 130 s, with a checkpoint of step 15
            row(15, 6.0, began=132.0, resumed=True, start=6.0),
            row(30, 21.0, began=132.0, start=6.0, step=15.0),
        ]
    )
    # Steps 16 .. 20 took 5 s; 13 s passed from the last row, at 125 s, until the next training.
    assert ledger.seconds["lost"] == pytest.approx(5.0)
    assert ledger.seconds["restarts"] == pytest.approx(7.0 + 6.0)
    assert ledger.seconds["training"] == pytest.approx(15.0 + 15.0)
    assert ledger.total == pytest.approx(132.0 + 21.0 - 100.0)
    assert ledger.attempts == 2


def test_a_run_has_a_ledger_and_the_verb_shows_it(finished, capsys):
    assert main(["show", "quick", "--ledger"]) == 0
    table = capsys.readouterr().out
    assert "training" in table
    assert "started once" in table
    assert main(["show", "runs/quick/config.yaml", "--ledger", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"] == pytest.approx(sum(found["seconds"].values()), abs=0.01)
    assert found["seconds"]["evaluation"] > 0
    ledger = read_ledger(finished.directory.path / "time.jsonl")
    assert ledger is not None
    assert format_ledger(ledger) == table.rstrip("\n")


@pytest.mark.thorough
def test_a_run_writes_a_trace_and_reads_it_back(study_home, capsys):
    assert main(["run", str(study_home), "--profile", "4:6", "evaluate.every=5"]) == 0
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
