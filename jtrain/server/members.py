"""Members of a run: the workers that are there, and a row for each that comes or goes."""

import dataclasses
import datetime
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.io.formatting import align_columns
from jtrain.io.jsonl import complete_rows

LOST = 3.0  # seconds in which a worker whose connection broke has to ask again


@dataclasses.dataclass
class Member:
    """A worker that has joined.

    Its number is the smallest that is free, so that a newcomer takes the place of one that left;
    `key`, which the worker has chosen, distinguishes the two.
    """

    worker: int
    key: str
    process: int | None
    """Number of the process that the run has started; None: the worker came by itself."""
    about: Mapping[str, Any]
    """Its machine and process."""
    leases: int = 0
    """Leases that it has done."""
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of its last request."""
    heard: float = dataclasses.field(default_factory=time.monotonic)
    """Time of its last request."""
    broken: float = 0.0
    """Time at which its connection broke; 0 while it holds."""

    @property
    def name(self) -> str:
        """Name for the log: `worker 3 (node2, process 4711)`."""
        place = f" ({self.about.get('host')}, process {self.about.get('pid')})"
        return f"worker {self.worker}" + (place if self.process is None else "")

    def hear(self, fields: Mapping[str, Any]) -> None:
        """Record a request."""
        self.request, self.heard, self.broken = fields, time.monotonic(), 0.0


class Members(dict[int, Member]):
    """Workers of a run by their numbers. Called with the coordinator's lock.

    Args:
        record: takes a row for workers.jsonl.
        most: workers that compute at the same time; those with higher numbers stand by.
    """

    def __init__(
        self,
        record: Callable[[Mapping[str, Any]], None] = lambda row: None,
        log: Callable[[str], None] = lambda line: None,
        *,
        most: int = 1 << 30,
    ):
        super().__init__()
        self._record, self._log, self._most = record, log, most

    def find(self, fields: Mapping[str, Any]) -> Member | None:
        """Return the member that has sent a request; None if it is none any more."""
        return next((member for member in self.values() if member.key == fields["key"]), None)

    def of_process(self, process: int) -> Member | None:
        """Return the member that is a process of the run's own."""
        return next((member for member in self.values() if member.process == process), None)

    def join(self, fields: Mapping[str, Any], step: int) -> Member:
        """Let a worker join; a process of the run's own has its number if that computes."""
        number = process = fields.get("process")
        if number is None or number in self or number >= self._most:
            number = self.free_number()
        about = {name: fields.get(name) for name in ("host", "pid")}
        member = self[number] = Member(number, fields["key"], process, about, request=fields)
        self._record({"step": step, "event": "joined", **_describe(member)})
        if process is None:
            self._log(f"{member.name} joined at step {step}: {len(self)} are there")
        return member

    def leave(self, member: Member, why: str, step: int) -> None:
        """Take a worker out."""
        del self[member.worker]
        row = {"step": step, "event": "left", **_describe(member), "why": why}
        self._record({**row, "leases": member.leases})
        self._log(
            f"{member.name} left at step {step} ({why}), after {member.leases} leases: "
            f"{len(self)} are there"
        )

    def lose(self, fields: Mapping[str, Any]) -> None:
        """Note that the connection of a worker broke, unless it has asked over another since."""
        found = self.find(fields)
        if found is not None and found.request is fields:
            found.broken = time.monotonic()

    def gone(self) -> list[Member]:
        """Return the members that have not come back after their connection broke."""
        now = time.monotonic()
        return [each for each in self.values() if each.broken and now > each.broken + LOST]

    def free_number(self) -> int:
        """Return the smallest number that is free."""
        return next(number for number in itertools.count() if number not in self)


def _describe(member: Member) -> dict[str, Any]:
    by = "itself" if member.process is None else "the run"
    row = {"time": round(time.time(), 3), "worker": member.worker, "started_by": by}
    return {**row, **member.about}


FILE = "workers.jsonl"


def attendance(directory: Path) -> list[dict[str, Any]]:
    """Return a row for each stay of a worker in a run, in the order of their arrival.

    `to_step` and `leases`, the leases that it has done, are None while it is there, and where the
    run ended with it.

    Raises:
        UserError: if the run has none.
    """
    path = directory / FILE
    rows = complete_rows(path)
    if not rows:
        raise UserError(
            f"{path} does not exist or is empty: the run has no workers of its own, or has not "
            f"begun. They are recorded with parallel.kind=server."
        )
    stays: list[dict[str, Any]] = []
    present: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["event"] == "joined":
            stay = {name: row[name] for name in ("worker", "host", "pid")}
            stay |= {"joined": row["time"], "from_step": row["step"]}
            stays.append(stay | {"to_step": None, "why": "", "leases": None})
            present[row["worker"]] = stays[-1]
        elif (stay := present.pop(row["worker"], None)) is not None:
            stay |= {"to_step": row["step"], "why": row["why"], "leases": row["leases"]}
    return stays


def format_attendance(stays: Sequence[Mapping[str, Any]]) -> str:
    """Return a table."""
    head = ("worker", "host", "process", "joined", "steps", "leases", "left")
    return "\n".join(align_columns([head, *map(_row, stays)], right=()))


def _row(stay: Mapping[str, Any]) -> tuple[str, ...]:
    joined = datetime.datetime.fromtimestamp(stay["joined"]).strftime("%Y-%m-%d %H:%M:%S")
    end, leases = ("" if stay[name] is None else f"{stay[name]}" for name in ("to_step", "leases"))
    place = f"{stay['worker']}", stay["host"], f"{stay['pid']}", joined
    return *place, f"{stay['from_step']}..{end}", leases, stay["why"]
