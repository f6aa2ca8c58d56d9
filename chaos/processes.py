"""Faults of whole processes at random moments: kills, exceptions, hangs and shutdown signals.

Each function injects one fault into a small run, lets the run end and compares it with an
undisturbed run: the rows of metrics.jsonl byte for byte, the last state bit for bit.
"""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from chaos.launched import (
    STEPS,
    Calm,
    Run,
    alive,
    calm_run,
    differences,
    home_of,
    start_run,
    until,
)
from chaos.trial import Trial
from jtrain.errors import DONE, STOPPED

MINUTES = 30  # duration of the run in which the watchdog must not find a hang
PATIENCE = 6.0  # seconds after which a phase of these runs counts as stuck
DOWN, AGAIN, GRACE = 2.0, 20.0, 25.0  # promised limits, in seconds
# In its first 0.1 s, before Python runs, a signal ends a process like any other program.
SETTLED = 1.0


def worker_kill(seed: int, folder: Path) -> Trial:
    """Kill one process of two at a random moment: all are down in 2 s, the next step in 20 s."""
    draw, began = random.Random(seed), time.monotonic()
    calm, victim, faults = calm_run(folder, 2), draw.randrange(2), []
    with _at_random(folder / f"worker_kill-{seed}", 2, calm, draw, 0.3, "--restarts", "3") as run:
        workers, moment = run.workers(), run.seconds
        os.kill(workers[victim], signal.SIGKILL)
        at = time.monotonic()
        until(lambda: not any(map(alive, workers.values())), 30.0)
        down = time.monotonic() - at
        stepped = run.next_step(at)
        code = run.wait()
    if code or down > DOWN or (stepped or 0) > AGAIN:
        faults = [f"exit code {code}: {run.words()}" if code else "too slow"]
    new = f"next step {stepped:.2f} s" if stepped else "no step was left"
    summary = f"process {victim} killed at {moment:.2f} s, down {down:.3f} s, {new}"
    return _trial("worker_kill", seed, began, run.home, faults, calm, summary)


def worker_exception(seed: int, folder: Path) -> Trial:
    """Raise in one process of two after a random step: all are down in 2 s, the traceback last."""
    draw, began = random.Random(seed), time.monotonic()
    calm, home = calm_run(folder, 2), home_of(folder, f"worker_exception-{seed}")
    victim, step = draw.randrange(2), draw.randrange(STEPS - 5)
    mark, faults = home / "mark", []
    with start_run(home, 2, fault=f"raises {victim} {step} {mark}") as run:
        code = run.wait()
        down = time.time() - mark.stat().st_mtime
    words = run.words()
    if code == 0 or "RuntimeError: hurt on purpose" not in words:
        faults.append(f"exit code {code} and no traceback: {words}")
    if down > DOWN:
        faults.append("too slow")
    with start_run(home, 2) as run:
        if code := run.wait():
            faults.append(f"the resumed run ended with {code}: {run.words()}")
    summary = f"process {victim} raised after step {step}, down {down:.3f} s"
    return _trial("worker_exception", seed, began, home, faults, calm, summary)


def hang(seed: int, folder: Path) -> Trial:
    """Make one process of two sleep, deadlock, block in a read or stop; it is named in time."""
    draw, began = random.Random(seed), time.monotonic()
    calm, home = calm_run(folder, 2), home_of(folder, f"hang-{seed}")
    how = ("sleeps", "deadlocks", "reads", "stopped")[seed % 4]
    victim, step = draw.randrange(2), draw.randrange(1, STEPS - 5)
    mark, faults = home / "mark", []
    # Data is prefetched: the fault hits the process in any phase of the training.
    patience = ",".join(f"{phase}={PATIENCE}" for phase in ("step", "data", "eval", "save"))
    words = ["--restarts", "1", "--patience", patience]
    with start_run(home, 2, *words, fault=f"{how} {victim} {step} {mark}") as run:
        code = run.wait()
    said, stacks = run.words(100), home / "runs" / "hurt" / f"stacks-{victim}.txt"
    if code or f"process {victim} has been " not in said or not stacks.exists():
        faults.append(f"exit code {code}: {said}")
    found = stacks.stat().st_mtime - mark.stat().st_mtime if stacks.exists() else float("inf")
    if found > PATIENCE + DOWN:
        faults.append("too slow")
    summary = f"process {victim} {how} after step {step}, found {found - PATIENCE:+.2f} s"
    return _trial("hang", seed, began, home, faults, calm, f"{summary} of its deadline")


def no_alarm(seed: int, folder: Path) -> Trial:
    """Run for half an hour with tight limits and a compilation of 60 s: no hang is reported.

    Each batch takes nearly as long as the limit allows.
    """
    began = time.monotonic()
    calm, home, faults = calm_run(folder, 2), home_of(folder, f"no_alarm-{seed}"), []
    words = ["--restarts", "0", "--patience", "step=40,data=35,compile=75"]
    with start_run(home, 2, *words, read=(26.0, 32.0), compiling=60.0) as run:
        code = run.wait(120.0 * MINUTES)
        minutes = run.seconds / 60
    if code or (home / "runs" / "hurt" / "stacks-0.txt").exists():
        faults.append(f"exit code {code}: {run.words(20)}")
    if minutes < MINUTES - 2:
        faults.append("the run was too short")
    return _trial("no_alarm", seed, began, home, faults, calm, f"{minutes:.1f} minutes")


def signal_at_random(seed: int, folder: Path) -> Trial:
    """Signal one process at a random moment, of one or two; it exits with 75 and resumes."""
    draw, began = random.Random(seed), time.monotonic()
    count, faults = 1 + seed % 2, []
    calm, victim = calm_run(folder, count), draw.randrange(count)
    number = draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
    with _at_random(folder / f"signal_at_random-{seed}", count, calm, draw, SETTLED) as run:
        moment = run.seconds
        os.kill(run.workers()[victim] if count > 1 else run.process.pid, number)
        at = time.monotonic()
        code, took = run.wait(), time.monotonic() - at
    if code not in {STOPPED, DONE} or took > GRACE:  # 0: the run was done
        faults.append(f"exit code {code} after {took:.1f} s: {run.words()}")
    with start_run(run.home, count) as run:
        if code_then := run.wait():
            faults.append(f"the resumed run ended with {code_then}: {run.words()}")
    summary = (
        f"{number.name} to process {victim} of {count} at {moment:.2f} s, {code} in {took:.2f} s"
    )
    return _trial("signal_at_random", seed, began, run.home, faults, calm, summary)


@contextlib.contextmanager
def _at_random(
    home: Path, processes: int, calm: Calm, draw: random.Random, first: float, *words: str
) -> Iterator[Run]:
    """Start a run and yield it at a random moment; retry with an earlier moment if it ended."""
    for sooner in (1.0, 0.5, 0.25, 0.125):
        moment = draw.uniform(first, first + sooner * calm.seconds)
        with start_run(home_of(home.parent, home.name), processes, *words) as run:
            while run.seconds < moment and not run.ended:
                time.sleep(0.005)
            if not run.ended and (processes == 1 or len(run.workers()) == processes):
                yield run
                return
    raise TimeoutError(f"{home}: each run ended before the fault")


def _trial(
    name: str,
    seed: int,
    began: float,
    home: Path,
    faults: list[str],
    calm: Calm,
    summary: str = "",
) -> Trial:
    if not faults and (other := differences(home, calm.home)):
        faults = [f"different result: {other}"]
    if not faults:
        shutil.rmtree(home)
    detail = "; ".join([summary, *faults] if summary else faults)
    return Trial(name, seed, not faults, time.monotonic() - began, detail)
