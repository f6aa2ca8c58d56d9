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
from jtrain.errors import HUNG
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
            if self._watched.update(self._pulse.now(), 0.0 if _debugged() else seconds):
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
