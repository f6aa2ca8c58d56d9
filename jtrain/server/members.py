"""Members of a run: the workers that are there, and a row for each that comes or goes."""

import dataclasses
import datetime
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
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
    broken: float | None = None
    """Time at which its connection broke."""

    @property
    def name(self) -> str:
        """Name for the log: `worker 3 (node2, process 4711)`."""
        place = f" ({self.about.get('host')}, process {self.about.get('pid')})"
        return f"worker {self.worker}" + (place if self.process is None else "")


class Members:
    """Workers of a run by their numbers. Called with the coordinator's lock.

    Args:
        record: takes a row for workers.jsonl.
        log: takes a line.
        most: workers that compute at the same time; those with higher numbers stand by.
    """

    def __init__(
        self,
        record: Callable[[Mapping[str, Any]], None] = lambda row: None,
        log: Callable[[str], None] = lambda line: None,
        *,
        most: int = 1 << 30,
    ):
        self._record, self._log, self._most = record, log, most
        self._present: dict[int, Member] = {}
        self._count = itertools.count(1)
        self.reserved: set[int] = set()
        """Numbers of processes that the run has started, for which they are kept."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._present)

    def __len__(self) -> int:
        return len(self._present)

    def __getitem__(self, worker: int) -> Member:
        return self._present[worker]

    def find(self, fields: Mapping[str, Any]) -> Member | None:
        """Return the member that has sent a request; None if it is none any more."""
        key, members = fields.get("key"), self._present.values()
        found = next((member for member in members if member.key == key), None)
        if found is None or fields.get("worker", found.worker) != found.worker:
            return None
        return found

    def hear(self, fields: Mapping[str, Any]) -> None:
        """Note that a worker has sent a request."""
        if (found := self.find(fields)) is not None:
            found.request, found.broken = fields, None

    @property
    def processes(self) -> int:
        """Number of members that are processes of the run's own."""
        return sum(member.process is not None for member in list(self._present.values()))

    def of_process(self, process: int) -> Member | None:
        """Return the member that is a process of the run's own."""
        mine = (member for member in self._present.values() if member.process == process)
        return next(mine, None)

    def join(self, fields: Mapping[str, Any], step: int) -> Member:
        """Let a worker join; a process of the run's own has its number where it can.

        That is not so if another has taken it, or if a number that computes is free.
        """
        process: int | None = fields.get("process")
        number = self.free_number()
        if process is not None and process not in self._present:
            number = number if number < self._most <= process else process
        about = {name: fields.get(name) for name in ("host", "pid")}
        key = fields.get("key") or f"member {next(self._count)}"
        member = Member(number, key, process, about, request=fields)
        self._present[number] = member
        self._record({"step": step, "event": "joined", **self._row(member)})
        if process is None:
            self._log(f"{member.name} joined at step {step}: {len(self)} are there")
        return member

    def leave(self, member: Member, why: str, step: int) -> bool:
        """Take a worker out; return False if it was taken out before."""
        if self._present.get(member.worker) is not member:
            return False
        del self._present[member.worker]
        row = {"step": step, "event": "left", **self._row(member), "why": why}
        self._record({**row, "leases": member.leases})
        self._log(
            f"{member.name} left at step {step} ({why}), after {member.leases} leases: "
            f"{len(self)} are there"
        )
        return True

    def dismiss(self, fields: Mapping[str, Any]) -> None:
        """Take out a worker that knows that the run has ended."""
        found = self.find(fields)
        if found is not None:
            del self._present[found.worker]

    def has_guests(self) -> bool:
        """Return whether workers are there that the run has not started."""
        members = self._present.values()
        return any(member.process is None and member.broken is None for member in members)

    def broken(self, fields: Mapping[str, Any]) -> None:
        """Note that the connection of a worker broke, over which a request came.

        Another one may have come since, over a new connection.
        """
        found = self.find(fields)
        if found is not None and found.request is fields:
            found.broken = time.monotonic()

    def gone(self) -> list[Member]:
        """Return the members that have not come back after their connection broke."""
        limit = time.monotonic() - LOST
        return [m for m in self._present.values() if m.broken is not None and m.broken < limit]

    def free_number(self) -> int:
        """Return the smallest number that is free."""
        taken = self._present.keys() | self.reserved
        return next(number for number in itertools.count() if number not in taken)

    def _row(self, member: Member) -> dict[str, Any]:
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


def describe_attendance(directory: Path) -> str:
    """Return a line: how many workers came, and how many left."""
    stays = attendance(directory)
    left = sum(stay["to_step"] is not None for stay in stays)
    return f"{len(stays)} workers joined this run, and {left} left it before its end"


def format_attendance(stays: Sequence[Mapping[str, Any]]) -> str:
    """Return a table."""
    head = ("worker", "host", "process", "joined", "steps", "leases", "left")
    rows = [head, *(_row(stay) for stay in stays)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _row(stay: Mapping[str, Any]) -> tuple[str, ...]:
    joined = datetime.datetime.fromtimestamp(stay["joined"]).strftime("%Y-%m-%d %H:%M:%S")
    end, leases = ("" if stay[name] is None else f"{stay[name]}" for name in ("to_step", "leases"))
    place = f"{stay['worker']}", stay["host"], f"{stay['pid']}", joined
    return *place, f"{stay['from_step']}..{end}", leases, stay["why"]
