"""Ends a process that is asked to: at once where nothing is to be lost, else within its grace."""

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

MARGIN = 1.0  # seconds before its grace is over
_OVER = 0  # in the pipe: no signal has this number


def exit_on_early_signals() -> None:
    """From now on a signal that asks this process to end ends it with 75: nothing can be lost yet.

    A run that begins to train takes the signals over and gives them back. Call it in the main
    thread of a process that does nothing else.
    """
    for number in shutdown_signals():
        signal.signal(number, leave)


def leave(number: int, frame: FrameType | None) -> None:
    """End this process, which has nothing to lose."""
    del frame
    when = "after the last step" if HEARTBEAT.now().step else "before the first step"
    exit_now(f"asked to end ({signal.Signals(number).name}) {when}")


def exit_now(why: str) -> None:
    """Ends this process with 75 and a line; what is not on the disk is gone, as with a kill."""
    with contextlib.suppress(OSError):
        os.write(2, f"{why}; the same command goes on\n".encode())
    os._exit(STOPPED)


class SignalGuard:
    """Watches over the end of a process that is asked to end, from a thread, while it is entered.

    Python runs handlers in the main thread, and between two calls of C: a compilation, a device or
    a disk may hold that up for minutes. The thread is told by the kernel's own handler.

    Args:
        grace: seconds within which the process has ended.
        nothing_to_lose: whether it may end at once.
    """

    def __init__(self, grace: float, nothing_to_lose: Callable[[], bool]):
        self._grace, self._nothing = grace, nothing_to_lose
        self._ended = threading.Event()

    def __enter__(self) -> "SignalGuard":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        signal.set_wakeup_fd(self._before)
        os.write(self._write, bytes([_OVER]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _watch(self) -> None:
        request = ShutdownRequest()
        while not self._ended.is_set():
            (number,) = os.read(self._read, 1)
            if number not in ASKS:
                continue
            name, which = signal.Signals(number).name, request.signalled()
            if which == "second":
                exit_now(f"asked to end again ({name}): ended at once")
            if which == "repeat":
                continue
            if self._nothing():
                exit_now(f"asked to end ({name}): nothing to save")
            late = threading.Timer(max(self._grace - MARGIN, 0.0), self._late, [time.monotonic()])
            late.daemon = True
            late.start()  # before the warning, which a reader that is stuck may hold up
            with contextlib.suppress(OSError):
                os.write(2, warning(name).encode())
            request.warned()

    def _late(self, since: float) -> None:
        if not self._ended.is_set():
            exit_now(f"not ended {time.monotonic() - since:.0f} s after it was asked to (grace)")
