"""Watchdog inside a process: it ends a stuck run that no launcher watches."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jtrain.distributed.heartbeat.heartbeat import HEARTBEAT, Heartbeat
from jtrain.distributed.heartbeat.patience import Patience, WatchedProcess
from jtrain.errors import FAULT, HUNG
from jtrain.io.regular_files import open_regular


class PollingThread:
    """Base of a thread that runs `_watch` in a `with` block and ends when `_over` is set.

    Args:
        name: name of the thread.
        tick: seconds between two checks.
    """

    def __init__(self, name: str, tick: float):
        self._tick, self._over = tick, threading.Event()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        """Check until `_over` is set; subclasses implement this."""
        raise NotImplementedError


# Multiple of the launcher's patience: the launcher has to notice a hang first. Users do not choose
# these limits, so they are safe: 20 minutes without a step.
FACTOR = 4.0
PATIENCE = "JTRAIN_PATIENCE"  # other limits, as `--patience` takes them
TICK = 1.0  # seconds between two checks


class Watchdog(PollingThread):
    """Check of this process's own heartbeat, in a `with` block.

    On a hang it writes the stacks of all threads to `stacks-PROCESS.txt` in the run's directory and
    ends the process with 124. It waits for a user at a debugger, and in an interactive session,
    such as a notebook, it only writes and logs. A process that was stopped, or a machine that
    slept, was not stuck. Code that holds the GIL is visible only from outside (`jtrain launch`);
    under a launcher this watchdog does nothing, unless the environment sets its limits.

    Args:
        run: the run's directory.
        process: number of the process.
        patience: by default the limits in the environment, or `FACTOR` times the usual ones.
        leave: takes the exit code.
    """

    def __init__(
        self,
        run: Path,
        process: int,
        *,
        patience: Patience | None = None,
        pulse: Heartbeat = HEARTBEAT,
        tick: float = TICK,
        leave: Callable[[int], object] = os._exit,
    ):
        super().__init__("watchdog", tick)
        text = os.environ.get(PATIENCE, "")
        usual = Patience.parse(text) if text else Patience().times(FACTOR)
        self._watched, self._pulse = WatchedProcess(patience or usual), pulse
        self._needed = not pulse.watched or bool(text)
        self._stacks, self._process = run / f"stacks-{process}.txt", process
        self._leave = leave

    def __enter__(self) -> None:
        if self._needed:
            super().__enter__()

    def __exit__(self, *error: object) -> None:
        if self._needed:
            super().__exit__(*error)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(self._tick):
            now = time.monotonic()
            # Two ticks at most: more means that the process or the machine was stopped.
            seconds, before = min(now - before, 2 * self._tick), now
            # Only where it matters: under Ray, Python 3.11.7 crashed in f_back of another thread.
            if self._watched.still > self._watched.limit / 2 and _debugged():
                seconds = 0.0
            if self._watched.update(self._pulse.now(), seconds):
                self._end()
                return

    def _end(self) -> None:
        beat = self._pulse.now()
        message = (
            f"process {self._process} has been in the phase {beat.phase}, step {beat.step}, for "
            f"{self._watched.still:.0f} s (allowed {self._watched.limit:.0f} s): stuck. The stacks "
            f"of its threads: {self._stacks}. If it was not stuck, {PATIENCE}={beat.phase}="
            f"{3 * self._watched.limit:.0f} allows more.\n"
        )
        with contextlib.suppress(OSError), open_regular(self._stacks, "wb") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        if not _interactive():
            self._leave(HUNG)


class DeadlockWatch(PollingThread):
    """Check that XLA's CPU devices compute while Python waits for them, in a `with` block.

    If the process has used no processor time (`clock`) for `patience` checks, a second each, while
    its main thread waits in JAX (`waits`), then the collectives of its devices wait for one another
    (`distributed/cpu_threads.py`). The process ends with 70 and the `advice`, before
    XLA aborts it after 60 s with the stacks of its threads.
    """

    def __init__(
        self,
        advice: str,
        *,
        patience: int = 50,
        tick: float = TICK,
        clock: Callable[[], float] = time.process_time,
        waits: Callable[[], bool] | None = None,
        leave: Callable[[int], object] = os._exit,
    ):
        super().__init__("deadlock watch", tick)
        self._advice, self._patience, self._clock = advice, patience, clock
        self._waits, self._leave = waits or _waits_in_jax, leave

    def _watch(self) -> None:
        idle, before = 0, self._clock()
        while not self._over.wait(self._tick):
            now = self._clock()
            idle = idle + 1 if now - before < IDLE and self._waits() else 0
            before = now
            if idle >= self._patience:
                message = f"The collectives of the CPU devices wait for one another. {self._advice}"
                with contextlib.suppress(OSError):
                    os.write(2, f"{message}\n".encode())
                self._leave(FAULT)
                return


IDLE = 0.01  # seconds of processor time between two checks below which nothing is computed


def _waits_in_jax() -> bool:
    """Return whether the main thread is in a call of JAX, or of the loop that waits for one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = frame.f_globals.get("__name__", "") if frame else ""
    return name.partition(".")[0] == "jax" or name == "jtrain.core.loop"


def _debugged() -> bool:
    """Return whether a debugger steps through a thread of this process."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_globals.get("__name__") in {"bdb", "pdb"}:
                return True
            frame = frame.f_back
    return False


def _interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
