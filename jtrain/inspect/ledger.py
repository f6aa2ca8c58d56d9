"""The time ledger of a run, for `jtrain show RUN --ledger`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.io.formatting import align_columns, format_duration
from jtrain.io.jsonl import read_rows

# Entries by the phases of the heartbeat while a run trains; the order is that of the table.
_ENTRIES = {
    "training": ("step", "hooks"),
    "waiting for data": ("data",),
    "evaluation": ("eval",),
    "checkpoints": ("save",),
    "samples and pictures": ("sampling",),
    "start": ("start", "restore"),
    "compilation": ("compile",),
    "end": ("end",),
}
_SAME_ATTEMPT = 1.0  # seconds between two readings of when an attempt began


@dataclasses.dataclass(frozen=True)
class TimeLedger:
    """Seconds of a run by what it did; the entries add up to the time since its first start."""

    seconds: Mapping[str, float]
    """Entries: training, waiting for data, evaluation, checkpoints, samples and pictures, start,
    compilation, end; restarts: from the last sign of an attempt until the next trains; lost: steps
    that were repeated after a kill or a rollback, with all that was done between them."""
    attempts: int
    """Times that the run was started."""

    @property
    def total(self) -> float:
        """Sum of all entries."""
        return sum(self.seconds.values())

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values, in seconds; goodput is the share that trained."""
        return {
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "total": round(self.total, 3),
            "goodput": self.seconds["training"] / self.total if self.total else 0.0,
            "attempts": self.attempts,
        }


def read_ledger(path: Path) -> TimeLedger | None:
    """Return the ledger of a run from its time.jsonl; None if the file is missing or empty.

    Raises:
        CheckpointError: if a row is malformed.
    """
    rows = read_rows(path)
    try:
        return make_ledger(rows) if rows else None
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"a row of {path} is malformed ({type(error).__name__}: {error}). The run does not "
            f"need the file; move it away, and its times are lost: mv {path} {path}.old"
        ) from None


def make_ledger(rows: Sequence[Mapping[str, Any]]) -> TimeLedger:
    """Return the ledger of the rows of time.jsonl, in the order in which they were written.

    Where a run resumes from an earlier step than it had reached, the time since that step is lost;
    between two rows it is divided in proportion to the steps.
    """
    totals = dict.fromkeys([*_ENTRIES, "restarts", "lost"], 0.0)
    spans: list[tuple[int, int, dict[str, float]]] = []  # first and last step, and the entries
    attempts, last = 0, None
    for row in rows:
        phases, step = row["phases"], row["step"]
        if last is None:
            attempts += 1
            spans.append((0, 0, _entries(phases, {})))  # no resume loses them
        elif row["seconds"] < last["seconds"] or row["began"] - last["began"] > _SAME_ATTEMPT:
            attempts += 1
            down = row["began"] - last["began"] - last["seconds"]
            totals["restarts"] += max(0.0, down) + row["seconds"]
        else:
            spans.append((last["step"], step, _entries(phases, last["phases"])))
        if row.get("resumed"):
            spans, after = [], spans
            for first, end, entries in after:
                share = (step - first) / (end - first) if end > first else float(end <= step)
                share = min(1.0, max(0.0, share))
                spans.append((first, min(end, step), {k: share * x for k, x in entries.items()}))
                totals["lost"] += (1 - share) * sum(entries.values())
        last = row
    for _, _, entries in spans:
        for name, seconds in entries.items():
            totals[name] += seconds
    return TimeLedger(totals, attempts)


def format_ledger(ledger: TimeLedger) -> str:
    """Return the ledger as a table: entry, time, share."""
    total = ledger.total or 1.0
    entries = {name: x for name, x in ledger.seconds.items() if x >= 5e-4}
    rows = [
        ("time", "", "share"),
        *((name, format_duration(x), f"{x / total:.1%}") for name, x in entries.items()),
        ("in all", format_duration(ledger.total), "100.0%"),
    ]
    times = "once" if ledger.attempts == 1 else f"{ledger.attempts} times"
    return "\n".join([*align_columns(rows, right=(1, 2)), f"started {times}"])


def format_goodput(ledger: TimeLedger) -> str:
    """Return the three largest entries in a line."""
    shares = sorted(ledger.seconds.items(), key=lambda entry: -entry[1])[:3]
    total = ledger.total or 1.0
    words = ", ".join(f"{name} {x / total:.0%}" for name, x in shares if x)
    return f"time: {format_duration(ledger.total)} in all; {words}"


def _entries(phases: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    since = lambda phase: phases.get(phase, 0.0) - before.get(phase, 0.0)
    return {entry: sum(map(since, names)) for entry, names in _ENTRIES.items()}
