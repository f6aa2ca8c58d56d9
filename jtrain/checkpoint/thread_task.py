"""Task in a thread whose error is returned to those who wait for it."""

import threading
from collections.abc import Callable

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
