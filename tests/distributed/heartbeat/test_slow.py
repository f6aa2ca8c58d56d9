"""Startup progress is logged if the first step takes long, and not otherwise."""

import functools
import importlib
import time
from types import SimpleNamespace

import numpy as np
import pytest

import jtrain as jt
from jtrain.distributed.heartbeat import Heartbeat, startup_progress
from jtrain.distributed.heartbeat.startup_progress import DOING, StartupProgress


def until(said: list[str], lines: int) -> None:
    end = time.monotonic() + 200
    while len(said) < lines:
        assert time.monotonic() < end, said
        time.sleep(0.01)


@pytest.mark.parametrize("phase", DOING)
def test_a_long_phase_is_reported_ever_less_often(phase: str):
    said, times, pulse = [], [], Heartbeat()
    tell = lambda line: (said.append(line), times.append(time.monotonic()))
    with StartupProgress(tell, pulse=pulse, first=0.1, tick=0.01):
        began = time.monotonic()
        pulse.phase(phase)
        until(times, 3)
    assert all(line.startswith(f"{DOING[phase]}: ") for line in said)
    assert all(at - began >= least for at, least in zip(times[:3], (0.1, 0.2, 0.4), strict=True))


@pytest.mark.thorough
def test_each_phase_has_its_own_time_and_a_step_is_not_reported(monkeypatch):
    said, pulse, looks, clock = [], Heartbeat(), [], [0.0]
    monkeypatch.setattr(startup_progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    now = pulse.now
    monkeypatch.setattr(pulse, "now", lambda: (looks.append(1), now())[1])

    def pass_time(seconds: float) -> None:
        until(looks, len(looks) + 2)  # the phase is seen
        clock[0] += seconds
        until(looks, len(looks) + 2)

    with StartupProgress(said.append, pulse=pulse, first=1.0, tick=0.001):
        for _ in range(30):
            pulse.phase("start")
            pass_time(0.9)
        pulse.beat("step", 1)
        pass_time(2.0)
        pulse.phase("compile")
        pass_time(0.9)
        assert said == []
        pass_time(0.2)
        assert said == ["compiling the step: 1 s so far"]


def test_closed_output_does_not_end_the_run():
    told, pulse = [], Heartbeat()

    def closed(line: str):
        told.append(line)
        raise BrokenPipeError

    with StartupProgress(closed, pulse=pulse, first=0.05, tick=0.01):
        pulse.phase("start")
        until(told, 2)


@pytest.mark.parametrize("quiet", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_slow_start_of_fit_is_reported(monkeypatch, capfd, quiet: bool):
    from jtrain.train.setup import TrainSetup

    compiled = TrainSetup.compile_step
    slowly = lambda setup, **options: time.sleep(1.0) or compiled(setup, **options)
    monkeypatch.setattr(TrainSetup, "compile_step", slowly)
    soon = functools.partial(StartupProgress, first=0.3, tick=0.05)
    monkeypatch.setattr(
        importlib.import_module("jtrain.train.train_to_end"), "StartupProgress", soon
    )
    loss = lambda params, batch, rng: ((params - batch["x"]) ** 2).mean()
    rows = {"x": np.arange(8, dtype=np.float32)}
    jt.fit(loss, np.zeros((), np.float32), rows, steps=2, batch=8, lr=0.1, quiet=quiet)
    assert ("compiling the step: " in capfd.readouterr().out) != quiet
