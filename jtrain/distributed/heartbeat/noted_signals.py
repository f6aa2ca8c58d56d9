"""Shutdown signals that are noted, for a program that looks at them between two pieces of work."""

import signal
from typing import Any

from jtrain.distributed.heartbeat.shutdown_request import shutdown_signals


class NotedSignals:
    """Shutdown signals, noted in a `with` block; a second one has its usual effect."""

    def __init__(self):
        self.name = ""
        """Name of the signal that came; empty before."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "NotedSignals":
        self._previous = {number: signal.getsignal(number) for number in shutdown_signals()}
        self.install()
        return self

    def install(self) -> None:
        """Install the handlers, also in the place of those that a library has installed since."""
        for number in shutdown_signals():
            if not self.name:
                signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
