"""Ends a run where it can go on again when it is asked to: Ctrl-C and SIGTERM."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from jtrain.loop import Hook, Stop
from jtrain.types import Metrics

_ACTIONS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_HINT = b"\nstopping after this step; once more to stop at once\n"


class Signals(Hook):
    """Stops the loop after the step in which SIGINT or SIGTERM came.

    The second signal acts at once, as it would without this: KeyboardInterrupt, or the end of the
    process. Within `with Signals() as signals:` only; the handlers of before are put back after it.
    Python handles signals in the main thread only: entered in another, this does nothing.

    Args:
        every: steps; those of a call where one takes several.
    """

    def __init__(self, *, every: int = 1):
        self.every = every
        self.why: str | None = None
        """What came, None while nothing has: also for a signal after the last step."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in _ACTIONS:
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: it was set by other than Python, and Python cannot put it back.
            signal.signal(number, _ACTIONS[number] if handler is None else handler)
        self._before.clear()

    def on_state(self, step: int, state: Any, metrics: Metrics) -> Stop | None:
        """Asks to stop if a signal came."""
        return None if self.why is None else Stop(self.why)

    def _came(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        self.why = "interrupted (Ctrl-C)" if number == signal.SIGINT else f"asked to end ({name})"
        for each, action in _ACTIONS.items():
            signal.signal(each, action)
        with contextlib.suppress(OSError):  # not print: what was interrupted may be printing
            os.write(2, _HINT)
