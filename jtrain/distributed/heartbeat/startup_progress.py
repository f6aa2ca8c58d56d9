"""Says what a run is doing before its first step, where that takes long."""

import contextlib
import time
from collections.abc import Callable, Mapping

from jtrain.distributed.heartbeat.heartbeat import HEARTBEAT, Heartbeat
from jtrain.distributed.heartbeat.polling_thread import PollingThread

DOING: Mapping[str, str] = {
    "start": "building the experiment and reading its data",
    "compile": "compiling the step",
    "restore": "making the state, or reading it",
}
FIRST = 5.0  # seconds; then after twice as many, again and again
TICK = 0.5


class StartupProgress(PollingThread):
    """While it is entered, tells how long a phase has lasted: after 5 s, 10 s, 20 s, 40 s, ...

    A large model compiles for minutes, and who sees nothing takes that for a hang.

    Args:
        tell: takes a line, on a thread.
        pulse: that is looked at.
        first: seconds before the first line of a phase.
        tick: seconds between two looks.
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
        seen, since, due = self._pulse.now(), time.monotonic(), self._first
        while not self._over.wait(self._tick):
            beat, now = self._pulse.now(), time.monotonic()
            if beat.number != seen.number:
                seen, since, due = beat, now, self._first
            elif now - since >= due and beat.phase in DOING:
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    self._tell(f"{DOING[beat.phase]}: {now - since:.0f} s so far")
                due *= 2
