"""Lets go wrong in this process what `jtrain launch --chaos` rehearses."""

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import folder
from jtrain.loop import Hook
from jtrain.pulse.fault import OWN, REHEARSAL, Fault, faults
from jtrain.types import Metrics

HOLDS = 60.0  # seconds in which what is done to this process is done


class RehearsedError(RuntimeError):
    """What was asked for, and nothing else."""


class Rehearsal(Hook):
    """After the step of a fault of its own it raises; at one that is done to it, it waits for it.

    So each comes after exactly that step, however quick steps are. Stands first, after the pulse.

    Args:
        to_come: of this process.
        where: the folder in which it is said, and is to be read, that one has happened.
    """

    def __init__(self, to_come: Sequence[Fault], where: Path):
        self._to_come = [fault for fault in to_come if fault.kind != "full-disk"]
        self._where = where
        for fault in to_come:
            if fault.kind == "full-disk":
                folder.begin = _full(folder.begin, fault, where)

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Does what is due."""
        for fault in [each for each in self._to_come if each.number <= step]:
            self._to_come.remove(fault)
            if fault.kind in OWN:
                fault.done(self._where).touch()
                raise RehearsedError(f"rehearsed: {fault}")
            end = time.monotonic() + HOLDS
            while not fault.done(self._where).exists() and time.monotonic() < end:
                time.sleep(0.002)


def rehearsal(environ: Mapping[str, str] = os.environ) -> list[Hook]:
    """The hook, if a rehearsal is asked for in this process."""
    text, _, where = environ.get(REHEARSAL, "").partition("|")
    own = int(environ.get("JTRAIN_PROCESS") or 0)
    to_come = [fault for fault in faults(text, own + 1000) if fault.process == own]
    return [Rehearsal(to_come, Path(where))] if to_come else []


def _full(
    begin: Callable[[Path, int], Path], fault: Fault, where: Path
) -> Callable[[Path, int], Path]:
    """Begins checkpoints until that of the fault, for which there is no room."""
    saves = 0

    def no_room(directory: Path, step: int) -> Path:
        nonlocal saves
        saves += 1
        if saves == fault.number and not fault.done(where).exists():
            fault.done(where).touch()
            raise OSError(errno.ENOSPC, f"rehearsed: {fault}", str(directory))
        return begin(directory, step)

    return no_room
