"""A rehearsal: faults done to a run on purpose, and how long it took to get over each."""

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
    """A fault that happened; times by the monotonic clock, 0 where it did not come to that."""

    fault: Fault
    at: float
    seen: float = 0.0
    down: float = 0.0
    stepped: float = 0.0
    how: str = ""
    survived: bool = False
    """Whether no process ended by it."""

    def row(self) -> tuple[str, ...]:
        """As it is printed."""
        if self.survived:
            return str(self.fault), "-", "-", "-", self.how
        since = lambda time: f"{time - self.at:.2f} s" if time else "never"
        return str(self.fault), since(self.seen), since(self.down), since(self.stepped), self.how


class FaultRehearsal:
    """The faults of a rehearsal, each of which happens once."""

    def __init__(self, faults: Sequence[Fault] = ()):
        self.to_come = list(faults)
        self.done: list[InjectedFault] = []
        self._now: list[InjectedFault] = []  # of the life that goes on
        self._told: list[Fault] = []  # to its processes, which know each by its place here

    def environment(self) -> dict[str, str]:
        """What the processes of the next life are told."""
        self._told = list(self.to_come)
        return {REHEARSAL: ",".join(map(str, self._told))} if self._told else {}

    def look(self, gang: ProcessGroup) -> None:
        """Does what is due, and notes what has happened."""
        if not self.to_come and not (self.done and not self.done[-1].stepped):
            return
        beats = gang.beats()
        if not self._now and min(beat.step for beat in beats) > 0:
            for each in self.done:
                each.stepped = each.stepped or time.monotonic()
        for fault in list(self.to_come):
            member, place = gang.members[fault.process], self._told.index(fault)
            if fault.kind not in OWN and beats[fault.process].step >= fault.number:
                member.signal(SIGNALS[fault.kind])
                member.note_rehearsed(place)
            if at := member.rehearsed(place):
                self.to_come.remove(fault)
                self._now.append(InjectedFault(fault, at))

    def ended(self, gang: ProcessGroup, ending: GroupExit) -> bool:
        """Whether the life ended by something that was done to it."""
        self.look(gang)
        happened, self._now = self._now, []
        others = any(each.fault.kind != "full-disk" for each in happened)
        for each in happened:
            each.seen, each.down = ending.at, ending.down
            each.how = "stuck" if ending.hang else f"exit code {ending.code}"
            # A save that failed is tried again: a life goes on, and ends well or by something else.
            each.survived = each.fault.kind == "full-disk" and (ending.code == DONE or others)
            if each.survived:
                each.how = "it went on, and ended with 0" if ending.code == DONE else "it went on"
        self.done += happened
        return not all(each.survived for each in happened)

    def report(self) -> str:
        """A table of what was done; empty where nothing was to be."""
        if not self.done and not self.to_come:
            return ""
        head = ("rehearsed", "seen after", "all down", "next step", "how it ended")
        rows = [head, *(each.row() for each in self.done)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [f"{fault}: did not come, the run was over before" for fault in self.to_come]
        return "\n".join(lines) + "\n"
