"""Attendance: the workers of a run as workers.jsonl records them."""

import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jtrain.errors import UserError
from jtrain.io.jsonl import complete_rows

FILE = "workers.jsonl"


class Stay(NamedTuple):
    """A worker from its arrival to its end."""

    worker: int
    host: str
    pid: int
    joined: float
    """Seconds since 1970."""
    from_step: int
    to_step: int | None = None
    """None: it is there, or the run ended with it."""
    why: str = ""
    leases: int | None = None
    """Leases that it has done: steps, or shares of a round."""


def attendance(directory: Path) -> list[Stay]:
    """Return the stays of the workers of a run in the order of their arrival.

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
    stays: list[Stay] = []
    open_stays: dict[int, int] = {}
    for row in rows:
        if row["event"] == "joined":
            open_stays[row["worker"]] = len(stays)
            stays.append(_begin(row))
        elif (index := open_stays.pop(row["worker"], None)) is not None:
            facts = {"to_step": row["step"], "why": row["why"], "leases": row["leases"]}
            stays[index] = stays[index]._replace(**facts)
    return stays


def describe_attendance(directory: Path) -> str:
    """Return a line: how many workers came, and how many left."""
    stays = attendance(directory)
    left = sum(stay.to_step is not None for stay in stays)
    return f"{len(stays)} workers joined this run, and {left} left it before its end"


def format_attendance(stays: list[Stay]) -> str:
    """Return a table."""
    head = ("worker", "host", "process", "joined", "steps", "leases", "left")
    rows = [head, *(_row(stay) for stay in stays)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _begin(row: dict[str, Any]) -> Stay:
    return Stay(row["worker"], row["host"], row["pid"], row["time"], row["step"])


def _row(stay: Stay) -> tuple[str, ...]:
    joined = datetime.datetime.fromtimestamp(stay.joined).strftime("%Y-%m-%d %H:%M:%S")
    end = "" if stay.to_step is None else f"{stay.to_step}"
    leases = "" if stay.leases is None else f"{stay.leases}"
    place = f"{stay.worker}", stay.host, f"{stay.pid}", joined
    return *place, f"{stay.from_step}..{end}", leases, stay.why
