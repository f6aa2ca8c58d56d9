"""Fault injection: the faults of `jtrain launch --chaos` that happen in this process."""

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

TIMEOUT = 60.0  # seconds to wait for a fault that is done to this process from outside


class InjectedError(RuntimeError):
    """Error of a rehearsed fault."""


class FaultInjection(Hook):
    """Hook that raises after the step of its own fault, and waits at a fault from outside.

    Each fault therefore happens after exactly its step, however quick steps are. The hook comes
    first, after the heartbeat.

    Args:
        faults: of this process, by their index among the faults of all processes.
        heartbeat: reports which faults have happened.
    """

    def __init__(self, faults: Mapping[int, Fault], heartbeat: Heartbeat = HEARTBEAT):
        self._pending = {i: fault for i, fault in faults.items() if fault.kind != "full-disk"}
        self._heartbeat = heartbeat
        for index, fault in faults.items():
            if fault.kind == "full-disk":
                layout.create_saving_path = _fill_disk(
                    layout.create_saving_path, fault, index, heartbeat
                )

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Raise or await the faults that are due."""
        for index in [i for i, fault in self._pending.items() if fault.number <= step]:
            fault = self._pending.pop(index)
            if fault.kind in OWN:
                self._heartbeat.note_fault(index)
                raise InjectedError(f"rehearsed: {fault}")
            end = time.monotonic() + TIMEOUT
            while not self._heartbeat.has_fault(index) and time.monotonic() < end:
                time.sleep(0.002)


def fault_hooks(environ: Mapping[str, str] = os.environ) -> list[Hook]:
    """Return the hook if a fault of this process is configured; else no hook."""
    own = int(environ.get("JTRAIN_PROCESS") or 0)
    every = parse_faults(environ.get(REHEARSAL, ""), own + 1000)
    faults = {index: fault for index, fault in enumerate(every) if fault.process == own}
    return [FaultInjection(faults)] if faults else []


def _fill_disk(
    begin: Callable[[Path, int], Path], fault: Fault, index: int, heartbeat: Heartbeat
) -> Callable[[Path, int], Path]:
    """Return `begin`, which finds the disk full at the checkpoint of the fault."""
    saves = 0

    def no_room(directory: Path, step: int) -> Path:
        nonlocal saves
        saves += 1
        if saves == fault.number and not heartbeat.has_fault(index):
            heartbeat.note_fault(index)
            raise OSError(errno.ENOSPC, f"rehearsed: {fault}", str(directory))
        return begin(directory, step)

    return no_room
