"""Fault injection: the faults of `jtrain launch --chaos` that happen in this process."""

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jtrain.checkpoint import layout
from jtrain.core.loop import Hook, StatelessHook
from jtrain.core.types import Metrics
from jtrain.distributed.heartbeat import HEARTBEAT, Heartbeat
from jtrain.distributed.heartbeat.fault import OWN, REHEARSAL, Fault, parse_faults

TIMEOUT = 60.0  # seconds to wait for a fault that is done to this process from outside


class InjectedError(RuntimeError):
    """Error of a rehearsed fault."""


class FaultInjection(StatelessHook):
    """Hook that raises after the step of its own fault, and waits at a fault from outside.

    Each fault therefore happens after exactly its step, however quick steps are. The hook comes
    first, after the heartbeat.

    Args:
        faults: of this process, by their index among the faults of all processes.
        heartbeat: reports which faults have happened.
    """

    def __init__(self, faults: Mapping[int, Fault], heartbeat: Heartbeat = HEARTBEAT):
        self._pending, self._heartbeat = dict(faults), heartbeat

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
    """Return the hook if a fault of this process's steps is configured; else no hook."""
    faults = _own_faults(environ)
    of_steps = {index: fault for index, fault in faults.items() if fault.kind != "full-disk"}
    return [FaultInjection(of_steps)] if of_steps else []


def folder_maker(
    environ: Mapping[str, str] = os.environ, heartbeat: Heartbeat = HEARTBEAT
) -> Callable[[Path, int], Path]:
    """Return the function that makes a checkpoint's folder, as `CheckpointManager` takes it.

    It finds the disk full at the saves for which such a fault is configured.
    """
    faults = {i: fault for i, fault in _own_faults(environ).items() if fault.kind == "full-disk"}
    saves = 0

    def create(directory: Path, step: int) -> Path:
        nonlocal saves
        saves += 1
        for index, fault in faults.items():
            if saves == fault.number and not heartbeat.has_fault(index):
                heartbeat.note_fault(index)
                raise OSError(errno.ENOSPC, f"rehearsed: {fault}", str(directory))
        return layout.create_saving_path(directory, step)

    return create


def _own_faults(environ: Mapping[str, str]) -> dict[int, Fault]:
    """Return the faults of this process, by their index among the faults of all processes."""
    own = int(environ.get("JTRAIN_PROCESS") or 0)
    every = parse_faults(environ.get(REHEARSAL, ""), own + 1000)
    return {index: fault for index, fault in enumerate(every) if fault.process == own}
