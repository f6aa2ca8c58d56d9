"""Ends a run where it can go on again when it is asked to: Ctrl-C and SIGTERM."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jtrain.loop import Hook, Stop
from jtrain.types import Metrics

_ACTIONS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_ANY = "asked to end (a signal to one of the processes)"
_HINT = b"\nstopping after this step; once more to stop at once\n"


class Signals(Hook):
    """Stops the loop after the step in which SIGINT or SIGTERM came.

    In several processes one that gets a signal is enough: all stop after the same step, which they
    agree on within about a second.

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
        self._several = False

    def __enter__(self) -> "Signals":
        self._several = jax.distributed.is_initialized()  # process_count() would start the devices
        if threading.current_thread() is threading.main_thread():
            # Of several processes JAX listens for SIGTERM, and tells the others.
            for number in [signal.SIGINT] if self._several else _ACTIONS:
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: it was set by other than Python, and Python cannot put it back.
            signal.signal(number, _ACTIONS[number] if handler is None else handler)
        self._before.clear()

    def on_state(self, step: int, state: Any, metrics: Metrics) -> Stop | None:
        """Asks to stop if a signal came; at several processes, to any of them."""
        if self._several:  # 29 us; JAX counts calls, one by one
            agreed = multihost_utils.reached_preemption_sync_point(step // self.every)
            return Stop(self.why or _ANY) if agreed else None
        return None if self.why is None else Stop(self.why)

    def _came(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        self.why = "interrupted (Ctrl-C)" if number == signal.SIGINT else f"asked to end ({name})"
        for each, action in _ACTIONS.items():
            if each in self._before:
                signal.signal(each, action)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(OSError):  # not print: what was interrupted may be printing
            os.write(2, _HINT)
