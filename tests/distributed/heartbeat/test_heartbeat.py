"""The heartbeat of a process, and the watchdogs that end a process that is stuck."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from plain_environ import until

from jtrain.distributed.heartbeat import CHANNEL, Beat, Channel, Heartbeat, read_beat
from jtrain.distributed.launcher import launch
from jtrain.distributed.watchdog import Patience, Watchdog, WatchedProcess


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
    file = channel.files.beats
    assert read_beat(file).number == 0, "no beat yet"
    heartbeat = Heartbeat()
    heartbeat.share(file)
    heartbeat.begin_run(tmp_path / "runs" / "möwe", grace=12.5)
    heartbeat.beat("hooks", 7)
    heartbeat.saved(5)
    beat = read_beat(file)
    assert (beat.phase, beat.step, beat.checkpoint, beat.grace) == ("hooks", 7, 5, 12.5)
    assert beat.run == str(tmp_path / "runs" / "möwe")
    assert abs(beat.time - time.monotonic()) < 60
    assert heartbeat.now() == beat


def test_an_inner_phase_returns_to_the_outer_phase(tmp_path: Path):
    heartbeat = Heartbeat()
    heartbeat.beat("step", 3)
    with heartbeat.during("eval"), heartbeat.during("save"):
        assert heartbeat.now().phase == "save"
    assert (heartbeat.now().phase, heartbeat.now().step) == ("step", 3)
    assert heartbeat.now().number == 5


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
        until(lambda: read_beat(channel.files.beats).number)
        time.sleep(0.2)
        process.send_signal(signal.SIGUSR2)
        until(lambda: b"stuck_in_c" in channel.stacks())
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
    assert read_beat(channel.files.beats).number == 0
    assert (tmp_path / "theirs").read_text() == "kept"


def beat(number: int, phase: str = "step", step: int = 0, time: float = 0.0) -> Beat:
    return Beat(number, phase, step, time, 0, 0.0, "")


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


def test_a_stuck_run_leaves_the_stacks_of_all_threads_and_ends(tmp_path: Path, capfd):
    codes, held = [], threading.Event()

    def waits_for_ever():
        held.wait()

    thread = threading.Thread(target=waits_for_ever)
    thread.start()
    heartbeat = Heartbeat()
    heartbeat.beat("data", 12)
    patience = Patience.parse("0.2")
    with Watchdog(
        tmp_path, 3, patience=patience, heartbeat=heartbeat, tick=0.02, leave=codes.append
    ):
        until(lambda: codes)
    held.set()
    thread.join()
    assert codes == [124]
    assert "waits_for_ever" in (tmp_path / "stacks-3.txt").read_text()
    said = capfd.readouterr().err
    assert "process 3 has been in the phase data, step 12, for 0 s (allowed 0 s): stuck" in said
    assert "JTRAIN_PATIENCE=data=" in said


@pytest.mark.thorough
def test_a_stopped_run_is_not_stuck(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from jtrain.distributed.heartbeat import HEARTBEAT\n"
        "from jtrain.distributed.watchdog import Patience, Watchdog\n"
        "HEARTBEAT.beat('data', 1)\n"
        "with Watchdog(Path(sys.argv[1]), 0, patience=Patience.parse('1.0'), tick=0.1):\n"
        "    print('now', flush=True)\n"
        "    time.sleep(0.3)\n"
        "print('done')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=300)[0] == "done\n"
    assert process.returncode == 0


# Two processes join and wait in a collective, and the second fails.
SCRIPT = """
import os, sys
from jax.experimental import multihost_utils
from jtrain.distributed.cluster import detect, start
from jtrain.errors import DataError

start(detect(os.environ), {}, timeout=60.0)
multihost_utils.sync_global_devices("both are here")
if os.environ["JTRAIN_PROCESS"] == "1":
    error = DataError if sys.argv[1] == "jtrain" else RuntimeError
    raise error("nobody catches it")
multihost_utils.sync_global_devices("only one is here")
"""
HOW = {
    "python": (1, "RuntimeError: nobody catches it"),
    "jtrain": (2, "jtrain.errors.DataError: nobody catches it"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", HOW)
def test_an_error_in_one_ends_all(how: str, capfd: pytest.CaptureFixture[str]):
    began, (code, words) = time.monotonic(), HOW[how]
    assert launch([sys.executable, "-c", SCRIPT, how], processes=2, devices=1) == code
    assert time.monotonic() - began < 250, "JAX waits 300 s for the others at the end of Python"
    *said, last = capfd.readouterr().err.splitlines()
    assert last == f"process 1 failed (exit code {code}), and all were ended"
    assert words in said
