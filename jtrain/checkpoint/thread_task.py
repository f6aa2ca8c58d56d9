"""Work in a thread, which a Ctrl-C in the main thread neither stops nor doubles."""

import threading
from collections.abc import Callable

_BEGINS_WITHIN = 10.0  # seconds


class ThreadTask:
    """A function that runs beside the caller; what it raised waits for whoever asks.

    An executor would not do: interrupted while it starts its thread, it forgets that it has one
    and starts another, and two saves write at a time (seen within 30 interrupts).
    """

    def __init__(self, function: Callable[[], object], *, daemon: bool = False):
        """`daemon`: Python ends without it and the threads that it starts; wait for it, then."""
        self._function, self._daemon = function, daemon
        self._begun, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._starting = False

    def start(self) -> None:
        """Begins. Keep the task somewhere before this: a Ctrl-C may raise from here."""
        thread = threading.Thread(target=self._run, name="checkpoint", daemon=self._daemon)
        self._starting = True
        thread.start()

    def ended(self) -> bool:
        """Whether it has come to its end, or to an error."""
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> BaseException | None:
        """What it raised, when it has come to its end or time is up; None too if it never began.

        A task never begins where a Ctrl-C came between `start` and its thread.
        """
        if not self._starting or not self._begun.wait(_BEGINS_WITHIN):
            return None
        self._ended.wait(seconds)
        return self._error

    def _run(self) -> None:
        self._begun.set()
        try:
            self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
