"""Processes of a run that are killed, raise, hang or are asked to end, when a seed says.

Each function hurts a small run once, lets it come to its end and compares that with the same run
that nobody hurt: the rows of metrics.jsonl byte for byte, the last state bit for bit.
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
    begun,
    calm_run,
    differences,
    home_of,
    until,
)
from chaos.trial import Trial
from jtrain.errors import DONE, STOPPED

MINUTES = 30  # that a run takes whose watch may not see a hang
PATIENCE = 6.0  # seconds after which a phase of these runs is taken for stuck
DOWN, AGAIN, GRACE = 2.0, 20.0, 25.0  # what is promised, in seconds
# Until Python runs, in the first 0.1 s, a signal ends a process as it ends any other.
SETTLED = 1.0


def worker_kill(seed: int, folder: Path) -> Trial:
    """A process of two is killed at any moment: all are down in 2 s, a new step is done in 20 s."""
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
    seen = f"process {victim} killed at {moment:.2f} s, down {down:.3f} s, {new}"
    return _told("worker_kill", seed, began, run.home, faults, calm, seen)


def worker_exception(seed: int, folder: Path) -> Trial:
    """A process of two raises after any step; the job is down in 2 s, with that traceback last."""
    draw, began = random.Random(seed), time.monotonic()
    calm, home = calm_run(folder, 2), home_of(folder, f"worker_exception-{seed}")
    victim, step = draw.randrange(2), draw.randrange(STEPS - 5)
    mark, faults = home / "mark", []
    with begun(home, 2, fault=f"raises {victim} {step} {mark}") as run:
        code = run.wait()
        down = time.time() - mark.stat().st_mtime
    words = run.words()
    if code == 0 or "RuntimeError: hurt on purpose" not in words:
        faults.append(f"exit code {code} and no traceback: {words}")
    if down > DOWN:
        faults.append("too slow")
    with begun(home, 2) as run:
        if code := run.wait():
            faults.append(f"going on ended with {code}: {run.words()}")
    seen = f"process {victim} raised after step {step}, down {down:.3f} s"
    return _told("worker_exception", seed, began, home, faults, calm, seen)


def hang(seed: int, folder: Path) -> Trial:
    """A process of two sleeps, deadlocks, reads for ever or is stopped; it is named in time."""
    draw, began = random.Random(seed), time.monotonic()
    calm, home = calm_run(folder, 2), home_of(folder, f"hang-{seed}")
    how = ("sleeps", "deadlocks", "reads", "stopped")[seed % 4]
    victim, step = draw.randrange(2), draw.randrange(1, STEPS - 5)
    mark, faults = home / "mark", []
    # Data is read ahead: what stops the process finds it in any phase of the training.
    patience = ",".join(f"{phase}={PATIENCE}" for phase in ("step", "data", "eval", "save"))
    words = ["--restarts", "1", "--patience", patience]
    with begun(home, 2, *words, fault=f"{how} {victim} {step} {mark}") as run:
        code = run.wait()
    said, stacks = run.words(100), home / "runs" / "hurt" / f"stacks-{victim}.txt"
    if code or f"process {victim} has been " not in said or not stacks.exists():
        faults.append(f"exit code {code}: {said}")
    found = stacks.stat().st_mtime - mark.stat().st_mtime if stacks.exists() else float("inf")
    if found > PATIENCE + DOWN:
        faults.append("too slow")
    seen = f"process {victim} {how} after step {step}, found {found - PATIENCE:+.2f} s"
    return _told("hang", seed, began, home, faults, calm, f"{seen} of its deadline")


def no_alarm(seed: int, folder: Path) -> Trial:
    """Half an hour under an impatient watch, with a compilation of 60 s: it sees no hang.

    Each batch is waited for nearly as long as may be.
    """
    began = time.monotonic()
    calm, home, faults = calm_run(folder, 2), home_of(folder, f"no_alarm-{seed}"), []
    words = ["--restarts", "0", "--patience", "step=40,data=35,compile=75"]
    with begun(home, 2, *words, read=(26.0, 32.0), compiling=60.0) as run:
        code = run.wait(120.0 * MINUTES)
        minutes = run.seconds / 60
    if code or (home / "runs" / "hurt" / "stacks-0.txt").exists():
        faults.append(f"exit code {code}: {run.words(20)}")
    if minutes < MINUTES - 2:
        faults.append("it was too short")
    return _told("no_alarm", seed, began, home, faults, calm, f"{minutes:.1f} minutes")


def signal_at_random(seed: int, folder: Path) -> Trial:
    """One process or one of two is asked to end at any moment; it ends with 75 and goes on."""
    draw, began = random.Random(seed), time.monotonic()
    count, faults = 1 + seed % 2, []
    calm, victim = calm_run(folder, count), draw.randrange(count)
    number = draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
    with _at_random(folder / f"signal_at_random-{seed}", count, calm, draw, SETTLED) as run:
        moment = run.seconds
        os.kill(run.workers()[victim] if count > 1 else run.process.pid, number)
        at = time.monotonic()
        code, took = run.wait(), time.monotonic() - at
    if code not in {STOPPED, DONE} or took > GRACE:  # 0: its work was done
        faults.append(f"exit code {code} after {took:.1f} s: {run.words()}")
    with begun(run.home, count) as run:
        if code_then := run.wait():
            faults.append(f"going on ended with {code_then}: {run.words()}")
    seen = f"{number.name} to process {victim} of {count} at {moment:.2f} s, {code} in {took:.2f} s"
    return _told("signal_at_random", seed, began, run.home, faults, calm, seen)


@contextlib.contextmanager
def _at_random(
    home: Path, processes: int, calm: Calm, draw: random.Random, first: float, *words: str
) -> Iterator[Run]:
    """A run at a random moment; once more, and sooner, where it has ended by then."""
    for sooner in (1.0, 0.5, 0.25, 0.125):
        moment = draw.uniform(first, first + sooner * calm.seconds)
        with begun(home_of(home.parent, home.name), processes, *words) as run:
            while run.seconds < moment and not run.ended:
                time.sleep(0.005)
            if not run.ended and (processes == 1 or len(run.workers()) == processes):
                yield run
                return
    raise TimeoutError(f"{home}: the run had ended each time before it was to be hurt")


def _told(
    name: str,
    seed: int,
    began: float,
    home: Path,
    faults: list[str],
    calm: Calm,
    seen: str = "",
) -> Trial:
    if not faults and (other := differences(home, calm.home)):
        faults = [f"another result: {other}"]
    if not faults:
        shutil.rmtree(home)
    detail = "; ".join([seen, *faults] if seen else faults)
    return Trial(name, seed, not faults, time.monotonic() - began, detail)
