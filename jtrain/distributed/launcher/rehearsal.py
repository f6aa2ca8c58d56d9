"""Rehearsal: faults injected into a run, and the time that the run took to recover."""

import dataclasses
import signal
import time
from collections.abc import Sequence

from jtrain.distributed.heartbeat.fault import OWN, REHEARSAL, Fault
from jtrain.distributed.launcher.process_group import GroupExit, ProcessGroup
from jtrain.errors import DONE

SIGNALS = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP, "term": signal.SIGTERM}


@dataclasses.dataclass
class InjectedFault:
    """An injected fault; times by the monotonic clock, 0 if the event did not come."""

    fault: Fault
    time: float
    noticed: float = 0.0
    down: float = 0.0
    stepped: float = 0.0
    result: str = ""
    survived: bool = False
    """True if no process ended by it."""

    def row(self) -> tuple[str, ...]:
        """Return the row of the report."""
        if self.survived:
            return str(self.fault), "-", "-", "-", self.result
        times = [
            f"{time - self.time:.2f} s" if time else "never"
            for time in (self.noticed, self.down, self.stepped)
        ]
        return str(self.fault), *times, self.result


class FaultRehearsal:
    """The faults of a rehearsal; each happens once."""

    def __init__(self, faults: Sequence[Fault] = ()):
        self.pending = list(faults)
        self.done: list[InjectedFault] = []
        self._current: list[InjectedFault] = []  # in the current attempt
        self._known: list[Fault] = []  # to its processes, which know a fault by its index here

    def environment(self) -> dict[str, str]:
        """Return the environment of the next attempt's processes."""
        self._known = list(self.pending)
        return {REHEARSAL: ",".join(map(str, self._known))} if self._known else {}

    def update(self, group: ProcessGroup) -> None:
        """Inject the faults that are due, and record those that happened."""
        if not self.pending and not (self.done and not self.done[-1].stepped):
            return
        beats = group.beats()
        if not self._current and min(beat.step for beat in beats) > 0:
            for each in self.done:
                each.stepped = each.stepped or time.monotonic()
        for fault in list(self.pending):
            worker, index = group.workers[fault.process], self._known.index(fault)
            if fault.kind not in OWN and beats[fault.process].step >= fault.number:
                worker.signal(SIGNALS[fault.kind])
                worker.note_fault(index)
            if seconds := worker.fault_time(index):
                self.pending.remove(fault)
                self._current.append(InjectedFault(fault, seconds))

    def finish(self, group: ProcessGroup, exit: GroupExit) -> bool:
        """Record the end of an attempt; return whether an injected fault ended it."""
        self.update(group)
        happened, self._current = self._current, []
        others = any(each.fault.kind != "full-disk" for each in happened)
        for each in happened:
            each.noticed, each.down = exit.time, exit.down
            each.result = "stuck" if exit.hang else f"exit code {exit.code}"
            # A failed save is retried: the attempt continues, and ends well or by another fault.
            each.survived = each.fault.kind == "full-disk" and (exit.code == DONE or others)
            if each.survived:
                each.result = "survived, exit code 0" if exit.code == DONE else "survived"
        self.done += happened
        return not all(each.survived for each in happened)

    def report(self) -> str:
        """Return a table of the injected faults; empty without faults."""
        if not self.done and not self.pending:
            return ""
        head = ("rehearsed", "seen after", "all down", "next step", "how it ended")
        rows = [head, *(each.row() for each in self.done)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [f"{fault}: did not happen, the run ended before" for fault in self.pending]
        return "\n".join(lines) + "\n"
