"""The heartbeat of a process is read by another; a stuck process is late, and a slow one is not."""

import functools
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jtrain as jt
from jtrain.distributed.heartbeat import CHANNEL, Beat, Channel, Heartbeat, read_beat
from jtrain.distributed.watchdog import DOING, Patience, StartupProgress, WatchedProcess
from jtrain.errors import UserError


@pytest.fixture
def channel():
    with Channel() as shared:
        yield shared


def started(code: str, channel: Channel, **options) -> subprocess.Popen:
    """Start Python code in a process that beats on the channel."""
    environ = {**os.environ, **channel.environ, "JTRAIN_PROCESS": "3"}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environ, pass_fds=channel.files, **options)


def test_another_process_reads_the_last_beat(tmp_path: Path, channel: Channel):
    file = channel.files.pulse
    assert read_beat(file).number == 0, "no beat yet"
    pulse = Heartbeat()
    pulse.share(file)
    pulse.begin_run(tmp_path / "runs" / "möwe", grace=12.5)
    pulse.beat("hooks", 7)
    pulse.saved(5)
    beat = read_beat(file)
    assert (beat.phase, beat.step, beat.checkpoint, beat.grace) == ("hooks", 7, 5, 12.5)
    assert beat.run == str(tmp_path / "runs" / "möwe")
    assert abs(beat.seconds - time.monotonic()) < 60
    assert pulse.now() == beat


def test_an_inner_phase_returns_to_the_outer_phase(tmp_path: Path):
    pulse = Heartbeat()
    pulse.beat("step", 3)
    with pulse.during("eval"), pulse.during("save"):
        assert pulse.now().phase == "save"
    assert (pulse.now().phase, pulse.now().step) == ("step", 3)
    assert pulse.now().number == 5


def test_a_watched_process_writes_its_stacks_even_when_no_python_runs(channel: Channel):
    code = (
        "import ctypes; from jtrain.distributed.heartbeat import HEARTBEAT, connect_heartbeat\n"
        "connect_heartbeat()\n"
        "HEARTBEAT.beat('data', 4)\n"
        "def stuck_in_c(): ctypes.PyDLL(None).sleep(60)  # holds the GIL\n"
        "stuck_in_c()"
    )
    process = started(code, channel)
    try:
        deadline = time.monotonic() + 200
        while read_beat(channel.files.pulse).number == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        process.send_signal(signal.SIGUSR2)
        while b"stuck_in_c" not in (text := channel.stacks()):
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


def test_a_process_without_the_files_is_not_watched(tmp_path: Path, channel: Channel):
    """Check a child of a script under `jtrain launch`: it inherits the environment, but no file."""
    (tmp_path / "theirs").write_text("kept")
    code = (
        "import os, sys; from jtrain.distributed.heartbeat import HEARTBEAT, connect_heartbeat\n"
        "connect_heartbeat()\n"
        "HEARTBEAT.beat('save', 99); assert not HEARTBEAT.watched"
    )
    theirs = os.open(tmp_path / "theirs", os.O_RDWR)
    try:
        known = channel.environ[CHANNEL].partition(":")[2]
        environ = {**os.environ, CHANNEL: f"{theirs}:{known}"}
        for files in ((), (theirs,)):
            command = [sys.executable, "-c", code]
            subprocess.run(command, env=environ, pass_fds=files, check=True, timeout=300)
    finally:
        os.close(theirs)
    assert read_beat(channel.files.pulse).number == 0
    assert (tmp_path / "theirs").read_text() == "kept"


def beat(number: int, phase: str = "step", step: int = 0, seconds: float = 0.0) -> Beat:
    return Beat(number, phase, step, seconds, 0, 0.0, "")


def test_a_process_is_late_when_its_phase_lasts_too_long():
    watched = WatchedProcess(Patience.parse("10"))
    assert not watched.update(beat(1, "data"), 1.0)
    assert not watched.update(beat(1, "data"), 9.0)
    assert watched.update(beat(1, "data"), 1.5)
    assert not watched.update(beat(2, "step"), 1.0), "a new beat"


def test_a_step_may_take_five_of_its_kind():
    watched = WatchedProcess(Patience.parse("10"))
    for number in range(1, 20):  # 4 s each
        watched.update(beat(number, "step", number, 4.0 * number), 4.0)
    assert watched.step_seconds == 4.0
    assert not watched.update(beat(19, "step", 19, 76.0), 19.0)
    assert watched.update(beat(19, "step", 19, 76.0), 2.0)


@pytest.mark.parametrize("text", ["stp=30", "step=", "-3"])
def test_an_invalid_patience_is_refused_with_advice(text: str):
    with pytest.raises(UserError, match=r"the phases are start, compile.*Type --patience 60"):
        Patience.parse(text)


def until(said: list[str], lines: int) -> None:
    end = time.monotonic() + 200
    while len(said) < lines:
        assert time.monotonic() < end, said
        time.sleep(0.01)


def test_a_long_phase_is_reported_ever_less_often():
    said, times, pulse = [], [], Heartbeat()
    tell = lambda line: (said.append(line), times.append(time.monotonic()))
    with StartupProgress(tell, pulse=pulse, first=0.1, tick=0.01):
        began = time.monotonic()
        pulse.phase("compile")
        until(times, 3)
    assert all(line.startswith(f"{DOING['compile']}: ") for line in said)
    assert all(at - began >= least for at, least in zip(times[:3], (0.1, 0.2, 0.4), strict=True))


@pytest.mark.thorough
def test_a_slow_start_of_fit_is_reported(monkeypatch, capfd):
    from jtrain.train.program import Program

    compiled = Program.compile_step
    slowly = lambda *given, **options: time.sleep(1.0) or compiled(*given, **options)
    monkeypatch.setattr(Program, "compile_step", slowly)
    soon = functools.partial(StartupProgress, first=0.3, tick=0.05)
    monkeypatch.setattr(importlib.import_module("jtrain.train.run"), "StartupProgress", soon)
    loss = lambda params, batch, rng: ((params - batch["x"]) ** 2).mean()
    rows = {"x": np.arange(8, dtype=np.float32)}
    jt.fit(loss, np.zeros((), np.float32), rows, steps=2, batch=8, lr=0.1)
    assert "compiling the step: " in capfd.readouterr().out
