"""A worker stopped by SIGSTOP is named, with the stacks of all, in every phase."""

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plain_environ import plain_environ
from quick_study import CODE, write_study

# Stops the process with that index once it is in that phase at that step or later.
STOPS = """
import os
import signal
import threading
import time

from jtrain.distributed.heartbeat import HEARTBEAT


def stops(process, phase, step):
    while HEARTBEAT.now().phase != phase or HEARTBEAT.now().step < int(step):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSTOP)


told = os.environ["STOP"].split()
if told[0] == os.environ["JTRAIN_PROCESS"]:
    threading.Thread(target=stops, args=told, daemon=True).start()
"""
VALUES = ("steps=100000", "checkpoint.every=20", "evaluate.every=20", "parallel.kind=mirrored")


def launch_and_stop(
    home: Path, compiled: Path, where: str, *options: str, devices: int = 1, limit: float = 240
) -> tuple[int, str, float]:
    """Launch three processes, one of which stops; return the code, the output and the seconds."""
    write_study(home, f"{STOPS}\n{CODE}")
    env = plain_environ()
    words = ["launch", "--processes", "3", "--devices", f"{devices}", *options]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "jtrain", *words, "run", "configs/quick.yaml", "batch=18", *VALUES],
        cwd=home,
        env=env | {"STOP": where, "JAX_COMPILATION_CACHE_DIR": str(compiled)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )
    return done.returncode, done.stdout, time.monotonic() - began


def check(home: Path, end: tuple[int, str, float], process: int, limit: float) -> None:
    """Check that the stopped process is named, after its limit, and that all wrote their stacks."""
    code, said, seconds = end
    assert code == 124, said
    *_, last = said.splitlines()
    stopped = re.match(rf"process {process} has been .*?, stopped by a signal for (\S+) s", last)
    assert stopped, said
    assert limit - 2 <= float(stopped[1]) < limit + 15, (
        "another process may have waited a little longer"
    )
    assert seconds > limit - 2
    run, failed = home / "runs" / "quick", re.findall(r"process (\d) waited for it", last)
    for index in {0, 1, 2} - {int(each) for each in failed}:  # a failed one has shown its traceback
        if f"{run.absolute()}/stacks-*.txt" in last:
            assert "File " in (run / f"stacks-{index}.txt").read_text()
        else:  # no process had created the directory
            assert re.search(rf"^process {index}:\n(Current t|T)hread 0x", said, re.MULTILINE)


@pytest.mark.thorough
def test_a_stopped_process_is_named_with_the_stacks_of_all(tmp_path: Path, compiled: Path):
    end = launch_and_stop(tmp_path, compiled, "1 step 5", "--patience", "step=6")
    check(tmp_path, end, process=1, limit=6.0)
    assert (tmp_path / "runs" / "quick" / "stacks-1.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "step"),
    [("start", 0), ("compile", 0), ("restore", 0), ("data", 3), ("eval", 20), ("save", 20)],
)
@pytest.mark.parametrize("process", [0, 2])
def test_a_stopped_process_is_named_in_every_phase(
    tmp_path: Path, compiled: Path, phase: str, step: int, process: int
):
    """Name it also if another fails first: in the rendezvous, in gloo or by its heartbeat."""
    end = launch_and_stop(tmp_path, compiled, f"{process} {phase} {step}", "--patience", "step=40")
    early = phase in {"compile", "restore"}  # gloo's first meeting has a limit of 30 s
    check(tmp_path, end, process=process, limit=30.0 if early else 40.0)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(10))
def test_with_default_patience_ten_times_in_a_row(tmp_path: Path, compiled: Path, turn: int):
    """Name the stopped one; JAX's own heartbeat ended the others after 26 s, by SIGABRT."""
    draw = random.Random(turn)
    process, step, devices = draw.randrange(3), draw.randrange(1, 60), draw.choice((1, 2))
    phase = draw.choice(("step", "data", "hooks"))
    where = f"{process} {phase} {step}"
    end = launch_and_stop(tmp_path, compiled, where, devices=devices, limit=900)
    check(tmp_path, end, process=process, limit=300.0)
