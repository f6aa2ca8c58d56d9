"""Progress messages of a run before its first step."""

import contextlib
import time
from collections.abc import Callable, Mapping

from jtrain.distributed.heartbeat.heartbeat import HEARTBEAT, Heartbeat
from jtrain.distributed.heartbeat.watchdog import PollingThread

DOING: Mapping[str, str] = {
    "start": "building the experiment and reading its data",
    "compile": "compiling the step",
    "restore": "initializing or restoring the state",
}
FIRST = 5.0  # seconds before the first message; the interval doubles with each message
TICK = 0.5


class StartupProgress(PollingThread):
    """Log how long a phase has lasted, in a `with` block: after 5 s, 10 s, 20 s, 40 s, ...

    A large model compiles for minutes, and a silent run looks like a hang.

    Args:
        tell: takes a line, on a thread.
        pulse: the heartbeat to observe.
        first: seconds before the first line of a phase.
        tick: seconds between two checks.
    """

    def __init__(
        self,
        tell: Callable[[str], object],
        *,
        pulse: Heartbeat = HEARTBEAT,
        first: float = FIRST,
        tick: float = TICK,
    ):
        super().__init__("slow", tick)
        self._tell, self._pulse, self._first = tell, pulse, first

    def _watch(self) -> None:
        last, since, due = self._pulse.now(), time.monotonic(), self._first
        while not self._over.wait(self._tick):
            beat, now = self._pulse.now(), time.monotonic()
            if beat.number != last.number:
                last, since, due = beat, now, self._first
            elif now - since >= due and beat.phase in DOING:
                with contextlib.suppress(OSError, ValueError):  # the output is closed
                    self._tell(f"{DOING[beat.phase]}: {now - since:.0f} s so far")
                due *= 2
