"""Threads that save: their errors, and the end of a program, which waits for them.

A program that ends during a save waits until the checkpoint is sealed. Otherwise Orbax cannot start
more threads, logs that, and the program exits with 0 and without its checkpoint (12 of 12 times on
Python 3.11 and 3.13). `atexit` callbacks run too late. Callbacks of `threading` run in time if they
are registered after that of `concurrent.futures`, because the last one registered runs first: hence
the import.
"""

import concurrent.futures.thread  # noqa: F401
import os
import sys
import threading
import time
from collections.abc import Callable

from jtrain.errors import FAULT

_START_TIMEOUT = 10.0  # seconds


class ThreadTask:
    """Function that runs in a thread; `wait` returns the error that it raised.

    An executor would not do: interrupted while it starts its thread, an executor forgets the thread
    and starts another, and two saves write at a time (seen within 30 interrupts).
    """

    def __init__(self, function: Callable[[], object], *, daemon: bool = False):
        """Prepare a task; Python does not wait for a `daemon` and its threads at exit."""
        self._function, self._daemon = function, daemon
        self._started, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._starting = False

    def start(self) -> None:
        """Start the thread. Store the task first: a Ctrl-C may raise from here."""
        thread = threading.Thread(target=self._run, name="checkpoint", daemon=self._daemon)
        self._starting = True
        thread.start()
        self._started.set()  # a thread that is slow to begin is not a thread that never began

    def ended(self) -> bool:
        """Return whether the function has returned or raised."""
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> BaseException | None:
        """Return the error of the function at its end or at the timeout; None if it never started.

        A task never starts if a Ctrl-C came between `start` and its thread.
        """
        if not self._starting or not self._started.wait(_START_TIMEOUT):
            return None
        self._ended.wait(seconds)
        return self._error

    def _run(self) -> None:
        self._started.set()
        try:
            self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


_CLOSE_TIMEOUT = 600.0  # seconds
_EXIT_TIMEOUT = 30.0  # seconds from the end of the program, after a failed save


_open: list[Callable[[], None]] = []  # return when everything saved is on the disk
_registered = _failed = False


def expect_close(close: Callable[[], None]) -> None:
    """Call `close` at exit; if it fails, print the error and exit with code 70."""
    _register()
    if close not in _open:
        _open.append(close)


def mark_closed(close: Callable[[], None]) -> None:
    """Do not call `close` at exit."""
    if close in _open:
        _open.remove(close)


def expect_forced_exit() -> None:
    """Make sure that the program ends after a failed save, with code 70 if it must be killed.

    A thread of Orbax may wait for ever for a result of another thread that failed, and Python for
    that thread (1 of 12 runs whose disk failed).
    """
    global _failed
    _failed = True
    _register()


def _register() -> None:
    global _registered
    if not _registered:
        getattr(threading, "_register_atexit")(_close_all)  # noqa: B009  no public name
        os.register_at_fork(after_in_child=_open.clear)  # the writing thread does not exist there
        _registered = True


def _close_all() -> None:
    if _failed:
        threading.Thread(target=_kill_later, daemon=True).start()
    for close in list(_open):
        task = ThreadTask(close)
        task.start()
        error = task.wait(_CLOSE_TIMEOUT)
        if error is None and not task.ended():
            error = TimeoutError(f"a checkpoint was not written in {_CLOSE_TIMEOUT:.0f} s")
        if error is not None:
            print(error, file=sys.stderr, flush=True)  # noqa: T201
            sys.stdout.flush()
            os._exit(FAULT)


def _kill_later() -> None:
    time.sleep(_EXIT_TIMEOUT)
    print("a save has failed and its threads do not end: killed", file=sys.stderr)  # noqa: T201
    os._exit(FAULT)
