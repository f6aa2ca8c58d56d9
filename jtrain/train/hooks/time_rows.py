"""Rows of time.jsonl: the seconds that each attempt of a run has spent in each phase so far."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.core.loop import StatelessHook
from jtrain.core.types import Metrics
from jtrain.distributed.heartbeat import HEARTBEAT, Heartbeat
from jtrain.io.jsonl import JsonlWriter

LEAST, SHARE = 5.0, 0.01  # a row each 5 s, later each time that 1 % of the attempt has passed


class TimeRows(StatelessHook):
    """Hook that writes a row where training begins, at a cadence in time, and at the end.

    The rows of killed attempts stay, also those of steps that a later attempt repeats: they say
    which time was lost.

    Args:
        path: the file.
        start: step that training resumes from.
        every: steps a call.
    """

    def __init__(
        self,
        path: Path,
        *,
        start: int,
        every: int = 1,
        heartbeat: Heartbeat = HEARTBEAT,
        clock: Callable[[], float] = time.time,
    ):
        self.every = every
        self._heartbeat, self._clock = heartbeat, clock
        self._file = JsonlWriter(path, retain=lambda row: True)
        self._next, self._step = 0.0, start
        self._began = self._clock() - sum(heartbeat.seconds().values())
        self._write(start, resumed=True)

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Write a row if one is due."""
        self._step = step
        if time.monotonic() >= self._next:
            self._write(step)

    def close(self) -> None:
        """Write the last row, and close the file."""
        self._write(self._step)
        self._file.close()

    def _write(self, step: int, *, resumed: bool = False) -> None:
        phases = self._heartbeat.seconds()
        elapsed = sum(phases.values())
        row = {"step": step, "began": round(self._began, 3), "seconds": round(elapsed, 3)}
        row["phases"] = {name: round(x, 3) for name, x in phases.items() if x >= 5e-4}
        self._file.append(row | ({"resumed": True} if resumed else {}))
        self._next = time.monotonic() + max(LEAST, SHARE * elapsed)
