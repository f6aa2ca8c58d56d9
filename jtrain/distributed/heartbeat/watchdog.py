"""Ends a run that is stuck, from within: where nobody watches from outside."""

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jtrain.distributed.heartbeat.heartbeat import HEARTBEAT, Heartbeat
from jtrain.distributed.heartbeat.patience import Patience, WatchedProcess
from jtrain.distributed.heartbeat.polling_thread import PollingThread
from jtrain.errors import HUNG
from jtrain.io.regular_files import open_regular

# Times the patience of who watches from outside, who has to find it first. Nobody chose these
# limits, so they are for what can't be anything else: 20 minutes without a step.
FACTOR = 4.0
PATIENCE = "JTRAIN_PATIENCE"  # other limits, as `--patience` takes them
TICK = 1.0  # seconds between two looks


class Watchdog(PollingThread):
    """Looks at the pulse of its own process while it is entered.

    On a hang it writes the stacks of all threads to `stacks-PROCESS.txt` in the run's directory and
    ends the process with 124. It waits for who sits at a debugger, and where a person would lose
    more than a run, in a notebook say, it only writes and says so. A process that was stopped, or a
    machine that slept, was not stuck. What holds Python's lock is seen only from outside
    (`jtrain launch`), under which this one does nothing, unless it is given limits of its own.

    Args:
        run: the run's directory.
        process: its number.
        patience: what is typed in the environment, or the usual one `FACTOR` times, by default.
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
        typed = os.environ.get(PATIENCE, "")
        usual = Patience.parse(typed) if typed else Patience().times(FACTOR)
        self._watched, self._pulse = WatchedProcess(patience or usual), pulse
        self._needed = not pulse.watched or bool(typed)
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
            # No more than it asked for, or the process or the machine was stopped.
            seconds, before = min(now - before, 2 * self._tick), now
            if self._watched.look(self._pulse.now(), 0.0 if _debugged() else seconds):
                self._end()
                return

    def _end(self) -> None:
        beat = self._pulse.now()
        said = (
            f"process {self._process} has been in the phase {beat.phase}, step {beat.step}, for "
            f"{self._watched.still:.0f} s (allowed {self._watched.limit:.0f} s): stuck. The stacks "
            f"of its threads: {self._stacks}. If that was none: {PATIENCE}={beat.phase}="
            f"{3 * self._watched.limit:.0f} allows more.\n"
        )
        with contextlib.suppress(OSError), open_regular(self._stacks, "wb") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        with contextlib.suppress(OSError):
            os.write(2, said.encode())
        if not _interactive():
            self._leave(HUNG)


def _debugged() -> bool:
    """Whether somebody steps through a thread of this process."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_globals.get("__name__") in {"bdb", "pdb"}:
                return True
            frame = frame.f_back
    return False


def _interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
