"""Lets go wrong in this process what `jtrain launch --chaos` rehearses."""

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jtrain.checkpoint import layout
from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.distributed.heartbeat import HEARTBEAT, Heartbeat
from jtrain.distributed.heartbeat.fault import OWN, REHEARSAL, Fault, parse_faults

HOLDS = 60.0  # seconds in which what is done to this process is done


class InjectedError(RuntimeError):
    """What was asked for, and nothing else."""


class FaultInjection(Hook):
    """After the step of a fault of its own it raises; at one that is done to it, it waits for it.

    So each comes after exactly that step, however quick steps are. Stands first, after the pulse.

    Args:
        to_come: of this process, by their places among all that are to come.
        pulse: says that one has happened, and is told so.
    """

    def __init__(self, to_come: Mapping[int, Fault], pulse: Heartbeat = HEARTBEAT):
        self._to_come = {i: fault for i, fault in to_come.items() if fault.kind != "full-disk"}
        self._pulse = pulse
        for place, fault in to_come.items():
            if fault.kind == "full-disk":
                layout.begin = _full(layout.begin, fault, place, pulse)

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Does what is due."""
        for place in [i for i, fault in self._to_come.items() if fault.number <= step]:
            fault = self._to_come.pop(place)
            if fault.kind in OWN:
                self._pulse.rehearses(place)
                raise InjectedError(f"rehearsed: {fault}")
            end = time.monotonic() + HOLDS
            while not self._pulse.was_rehearsed(place) and time.monotonic() < end:
                time.sleep(0.002)


def rehearsal(environ: Mapping[str, str] = os.environ) -> list[Hook]:
    """The hook, if a rehearsal is asked for in this process."""
    own = int(environ.get("JTRAIN_PROCESS") or 0)
    every = parse_faults(environ.get(REHEARSAL, ""), own + 1000)
    to_come = {place: fault for place, fault in enumerate(every) if fault.process == own}
    return [FaultInjection(to_come)] if to_come else []


def _full(
    begin: Callable[[Path, int], Path], fault: Fault, place: int, pulse: Heartbeat
) -> Callable[[Path, int], Path]:
    """Begins checkpoints until that of the fault, for which there is no room."""
    saves = 0

    def no_room(directory: Path, step: int) -> Path:
        nonlocal saves
        saves += 1
        if saves == fault.number and not pulse.was_rehearsed(place):
            pulse.rehearses(place)
            raise OSError(errno.ENOSPC, f"rehearsed: {fault}", str(directory))
        return begin(directory, step)

    return no_room
