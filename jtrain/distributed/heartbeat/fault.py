"""Faults of a rehearsal, with the moment of each: `kill:1@step20`."""

import dataclasses
import difflib
import re

from jtrain.distributed.heartbeat.heartbeat import FAULTS
from jtrain.errors import UserError

REHEARSAL = "JTRAIN_REHEARSAL"  # the pending faults
KINDS = {
    "kill": "SIGKILL to a process",
    "stall": "SIGSTOP to a process: it exists, and does nothing",
    "term": "SIGTERM to a process: a shutdown signal",
    "raise": "an exception in a process",
    "full-disk": "the disk is full at a save",
}
OWN = {"raise", "full-disk"}  # the process itself does these; the launcher does the others
_EXAMPLE = "kill:1@step20,stall:0@step30,full-disk@save2"
_FAULT = re.compile(r"(?P<kind>[\w-]+)(:(?P<process>\d+))?@(?P<unit>step|save)(?P<number>\d+)")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault that is injected once."""

    kind: str
    process: int
    number: int
    """The step after which, or the save in which it happens; counted from 1."""

    def __str__(self) -> str:
        """Return the fault as it is typed."""
        if self.kind == "full-disk":
            return f"{self.kind}@save{self.number}"
        return f"{self.kind}:{self.process}@step{self.number}"


def parse_faults(text: str, processes: int) -> tuple[Fault, ...]:
    """Return the faults in a text, separated by commas; none for an empty text.

    Args:
        processes: number of processes of the run.

    Raises:
        UserError: if a part is not a fault, with the valid forms.
    """
    found = tuple(_fault(part.strip(), processes) for part in text.split(",") if text)
    if len(found) > FAULTS:
        raise UserError(
            f"jtrain launch: --chaos names {len(found)} faults, and a rehearsal takes {FAULTS}. "
            f"Rehearse the others in another run"
        )
    return found


def _fault(text: str, processes: int) -> Fault:
    found = _FAULT.fullmatch(text)
    if found is None:
        raise _error(text, "is not a fault; a fault is KIND:PROCESS@stepN, or full-disk@saveN")
    kind, process, unit = found["kind"], found["process"], found["unit"]
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise _error(text, f"has an unknown kind; the kinds are {', '.join(KINDS)}{meant}")
    if (kind == "full-disk") != (unit == "save"):
        raise _error(text, "does not fit: a full disk comes in a save, all others after a step")
    if process is None and kind != "full-disk" and processes > 1:
        raise _error(text, f"names none of the {processes} processes: type {kind}:0@{unit}1")
    if int(process or 0) >= processes:
        raise _error(text, f"names process {process}, and the processes are 0 to {processes - 1}")
    if int(found["number"]) == 0:
        raise _error(text, f"counts from 1: type {unit}1")
    return Fault(kind, int(process or 0), int(found["number"]))


def _error(text: str, why: str) -> UserError:
    end = "" if why.endswith("?") else "."
    return UserError(f"jtrain launch: --chaos {text!r} {why}{end} For example --chaos {_EXAMPLE}")
