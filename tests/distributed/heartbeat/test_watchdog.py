"""A stuck or failing process ends, and the others of its run with it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jtrain.distributed.heartbeat import Heartbeat
from jtrain.distributed.launcher import launch
from jtrain.distributed.watchdog import Patience, Watchdog


def until(condition, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stuck_run_leaves_the_stacks_of_all_threads_and_ends(tmp_path: Path, capfd):
    codes, held = [], threading.Event()

    def waits_for_ever():
        held.wait()

    thread = threading.Thread(target=waits_for_ever)
    thread.start()
    pulse = Heartbeat()
    pulse.beat("data", 12)
    patience = Patience.parse("0.2")
    with Watchdog(tmp_path, 3, patience=patience, pulse=pulse, tick=0.02, leave=codes.append):
        until(lambda: codes)
    held.set()
    thread.join()
    assert codes == [124]
    assert "waits_for_ever" in (tmp_path / "stacks-3.txt").read_text()
    said = capfd.readouterr().err
    assert "process 3 has been in the phase data, step 12, for 0 s (allowed 0 s): stuck" in said
    assert "JTRAIN_PATIENCE=data=" in said


def test_a_beating_run_is_not_stuck(tmp_path: Path):
    codes, pulse = [], Heartbeat()
    patience = Patience.parse("0.5")
    with Watchdog(tmp_path, 0, patience=patience, pulse=pulse, tick=0.02, leave=codes.append):
        for step in range(40):
            pulse.beat("hooks", step)
            time.sleep(0.03)
    assert codes == []
    assert not (tmp_path / "stacks-0.txt").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["stopped", "debugged"])
def test_a_stopped_or_debugged_run_is_not_stuck(tmp_path: Path, moment: str):
    code = (
        "import os, pdb, signal, sys, threading, time; from pathlib import Path\n"
        "from jtrain.distributed.heartbeat import HEARTBEAT\n"
        "from jtrain.distributed.watchdog import Patience, Watchdog\n"
        "HEARTBEAT.beat('data', 1)\n"
        "with Watchdog(Path(sys.argv[1]), 0, patience=Patience.parse('1.0'), tick=0.1):\n"
        "    print('now', flush=True)\n"
        "    if sys.argv[2] == 'debugged': pdb.Pdb(nosigint=True).set_trace()\n"
        "    time.sleep(0.3)\n"
        "print('done')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), moment],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    if moment == "stopped":
        process.send_signal(19)
    time.sleep(2)
    if moment == "stopped":
        process.send_signal(18)
    said, _ = process.communicate("continue\n", timeout=300)
    assert process.returncode == 0
    assert said.endswith("done\n")


# Two processes join and wait in a collective, and the second fails.
SCRIPT = """
import os, sys
from jax.experimental import multihost_utils
from jtrain.distributed.cluster import detect, start
from jtrain.distributed.shutdown import exit_alone
from jtrain.errors import DataError

start(detect(os.environ), {}, timeout=60.0)
multihost_utils.sync_global_devices("both are here")
if os.environ["JTRAIN_PROCESS"] == "1":
    if sys.argv[1] == "code":
        exit_alone(7)
    error = DataError if sys.argv[1] == "jtrain" else RuntimeError
    raise error("nobody catches it")
multihost_utils.sync_global_devices("only one is here")
"""
HOW = {
    "python": (1, "RuntimeError: nobody catches it"),
    "jtrain": (2, "jtrain.errors.DataError: nobody catches it"),
    "code": (7, ""),
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", HOW)
def test_an_error_in_one_ends_all(how: str, capfd: pytest.CaptureFixture[str]):
    began, (code, words) = time.monotonic(), HOW[how]
    assert launch([sys.executable, "-c", SCRIPT, how], processes=2, devices=1) == code
    assert time.monotonic() - began < 250, "JAX waits 300 s for the others at the end of Python"
    *said, last = capfd.readouterr().err.splitlines()
    assert last == f"process 1 failed (exit code {code}), and all were ended"
    assert words in said or not words
