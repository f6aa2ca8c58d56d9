"""The heartbeat of a process is read by another, whatever the first is doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jtrain.distributed.heartbeat import Heartbeat, read_beat
from jtrain.distributed.heartbeat.channel import CHANNEL, Channel


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


def test_a_channel_that_is_closed_again_closes_no_file_of_another(monkeypatch):
    """The kernel gives its numbers to the next files that are opened."""
    close, closed = os.close, []
    monkeypatch.setattr(os, "close", lambda file: (closed.append(file), close(file)))
    channel = Channel()
    channel.close()
    channel.close()
    assert sorted(file for file in closed if file in channel.files) == sorted(channel.files)


def test_an_inner_phase_returns_to_the_outer_phase(tmp_path: Path):
    pulse = Heartbeat()
    pulse.beat("step", 3)
    with pulse.during("eval"), pulse.during("save"):
        assert pulse.now().phase == "save"
    assert (pulse.now().phase, pulse.now().step) == ("step", 3)
    assert pulse.now().number == 5


def test_beats_are_never_torn(channel: Channel):
    code = (
        "import time\n"
        "from jtrain.distributed.heartbeat import HEARTBEAT as pulse, connect_heartbeat\n"
        "connect_heartbeat()\n"
        "step, end = 0, time.monotonic() + 1.0\n"
        "while time.monotonic() < end:\n"
        "    step += 1; pulse.beat('hooks' if step % 2 else 'data', step)"
    )
    writer, seen = started(code, channel), []
    while writer.poll() is None:
        seen.append(read_beat(channel.files.pulse))
    assert writer.returncode == 0
    assert len({beat.number for beat in seen}) > 10
    assert all(beat.number == beat.step for beat in seen)
    assert all(beat.phase == ("hooks" if beat.step % 2 else "data") for beat in seen if beat.step)


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


def test_a_child_process_does_not_beat_for_its_parent(channel: Channel):
    code = (
        "import os, subprocess, sys\n"
        "from jtrain.distributed.heartbeat import HEARTBEAT, connect_heartbeat\n"
        "connect_heartbeat()\n"
        "child = 'from jtrain.distributed.heartbeat import HEARTBEAT as h, connect_heartbeat; '\n"
        "child += 'connect_heartbeat(); h.beat(\"save\", 99)'\n"
        "HEARTBEAT.beat('data', 4); subprocess.run([sys.executable, '-c', child], check=True)"
    )
    assert started(code, channel).wait(timeout=300) == 0
    assert read_beat(channel.files.pulse).step == 4


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
