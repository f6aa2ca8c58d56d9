"""What is to go wrong in a rehearsal, and when: `kill:1@step20`."""

import dataclasses
import difflib
import re

from jtrain.distributed.heartbeat.heartbeat import FAULTS
from jtrain.errors import UserError

REHEARSAL = "JTRAIN_REHEARSAL"  # the faults that are still to come
KINDS = {
    "kill": "SIGKILL to a process",
    "stall": "SIGSTOP to a process: it is there, and does nothing",
    "term": "SIGTERM to a process: it is asked to end",
    "raise": "an exception in a process",
    "full-disk": "the disk is full at a save",
}
OWN = {"raise", "full-disk"}  # done by the process itself; the others are done to it
_EXAMPLE = "kill:1@step20,stall:0@step30,full-disk@save2"
_FAULT = re.compile(r"(?P<kind>[\w-]+)(:(?P<process>\d+))?@(?P<unit>step|save)(?P<number>\d+)")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once."""

    kind: str
    process: int
    number: int
    """Of the step after which, or the save in which it happens; counted from 1."""

    def __str__(self) -> str:
        """As it is typed."""
        if self.kind == "full-disk":
            return f"{self.kind}@save{self.number}"
        return f"{self.kind}:{self.process}@step{self.number}"


def parse_faults(text: str, processes: int) -> tuple[Fault, ...]:
    """Those that a text names, separated by commas; none in an empty one.

    Args:
        processes: that there are.

    Raises:
        UserError: for what is none, with what is.
    """
    found = tuple(_fault(part.strip(), processes) for part in text.split(",") if text)
    if len(found) > FAULTS:
        raise UserError(
            f"jtrain launch: --chaos names {len(found)} faults, and a rehearsal takes {FAULTS}. "
            f"Leave some out, and rehearse them in another run"
        )
    return found


def _fault(text: str, processes: int) -> Fault:
    found = _FAULT.fullmatch(text)
    if found is None:
        raise _refused(text, "is no fault: a fault is KIND:PROCESS@stepN, or full-disk@saveN")
    kind, process, unit = found["kind"], found["process"], found["unit"]
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise _refused(text, f"is of no kind that there is: {', '.join(KINDS)}{meant}")
    if (kind == "full-disk") != (unit == "save"):
        raise _refused(text, "does not fit: a full disk comes in a save, all others after a step")
    if process is None and kind != "full-disk" and processes > 1:
        raise _refused(text, f"names no process, and there are {processes}: type {kind}:0@{unit}1")
    if int(process or 0) >= processes:
        raise _refused(text, f"names process {process}, and there are 0 to {processes - 1}")
    if int(found["number"]) == 0:
        raise _refused(text, f"counts from 1: type {unit}1")
    return Fault(kind, int(process or 0), int(found["number"]))


def _refused(text: str, why: str) -> UserError:
    end = "" if why.endswith("?") else "."
    return UserError(f"jtrain launch: --chaos {text!r} {why}{end} Type, say, --chaos {_EXAMPLE}")
