"""Exit on a shutdown signal: at once if nothing can be lost, else within the grace period."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from jtrain.distributed.heartbeat.heartbeat import HEARTBEAT
from jtrain.distributed.heartbeat.shutdown_request import (
    ASKS,
    ShutdownRequest,
    shutdown_signals,
    warning,
)
from jtrain.errors import STOPPED

MARGIN = 1.0  # seconds before the end of the grace period
_OVER = 0  # written to the pipe to stop the thread: no signal has this number


def exit_on_early_signals() -> None:
    """Exit with 75 on a shutdown signal from now on: nothing can be lost yet.

    A run that begins to train installs its own handlers and restores these at its end. Call this in
    the main thread of a process that does nothing else.
    """
    for number in shutdown_signals():
        signal.signal(number, handle_early_signal)


def handle_early_signal(number: int, frame: FrameType | None) -> None:
    """Exit, since nothing can be lost."""
    del frame
    when = "after the last step" if HEARTBEAT.now().step else "before the first step"
    exit_now(f"received {signal.Signals(number).name} {when}")


def exit_now(why: str) -> None:
    """Exit with 75 and a line; anything not on the disk is lost, as with a kill."""
    with contextlib.suppress(OSError):
        os.write(2, f"{why}; the same command resumes\n".encode())
    os._exit(STOPPED)


class SignalGuard:
    """Thread that enforces the grace period of a shutdown signal, in a `with` block.

    Python runs handlers in the main thread, between two calls of C: a compilation, a device or a
    disk may delay them for minutes. The kernel-level handler wakes this thread.

    Args:
        grace: seconds within which the process has to end.
        nothing_to_lose: returns whether the process may exit at once.
    """

    def __init__(self, grace: float, nothing_to_lose: Callable[[], bool]):
        self._grace, self._nothing_to_lose = grace, nothing_to_lose
        self._ended = threading.Event()

    def __enter__(self) -> "SignalGuard":
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        signal.set_wakeup_fd(self._previous)
        os.write(self._write_end, bytes([_OVER]))
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _watch(self) -> None:
        request = ShutdownRequest()
        while not self._ended.is_set():
            (number,) = os.read(self._read_end, 1)
            if number not in ASKS:
                continue
            name, which = signal.Signals(number).name, request.signalled()
            if which == "second":
                exit_now(f"received a second signal ({name}): exited at once")
            if which == "repeat":
                continue
            if self._nothing_to_lose():
                exit_now(f"received {name}: nothing to save")
            late = threading.Timer(
                max(self._grace - MARGIN, 0.0), self._exit_late, [time.monotonic()]
            )
            late.daemon = True
            late.start()  # before the warning, which a stuck reader may delay
            with contextlib.suppress(OSError):
                os.write(2, warning(name).encode())
            request.warned()

    def _exit_late(self, since: float) -> None:
        if not self._ended.is_set():
            exit_now(f"not ended {time.monotonic() - since:.0f} s after the signal (grace)")
