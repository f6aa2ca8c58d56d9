"""Time ledger of a run: the share of its time that trained, waited, saved, and was lost."""

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
TRAINING, RESTARTS, LOST = "training", "restarts", "lost"
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

    @property
    def goodput(self) -> float:
        """Share of the time that trained, 0 to 1."""
        return self.seconds[TRAINING] / self.total if self.total else 0.0

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values, in seconds."""
        entries = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        return {
            "seconds": entries,
            "total": round(self.total, 3),
            "goodput": self.goodput,
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
    totals = dict.fromkeys([*_ENTRIES, RESTARTS, LOST], 0.0)
    spans: list[_Span] = []
    attempts, last = 0, None
    for row in rows:
        if last is None or _is_new_attempt(last, row):
            attempts += 1
            if last is None:
                _add(totals, _entries(row["phases"]))
            else:
                down = row["began"] - last["began"] - last["seconds"]
                totals[RESTARTS] += max(0.0, down) + row["seconds"]
        else:
            spans.append(_Span(last["step"], row["step"], _entries(_since(last, row))))
        if row.get("resumed"):
            spans, lost = _split(spans, row["step"])
            totals[LOST] += lost
        last = row
    for span in spans:
        _add(totals, span.entries)
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


@dataclasses.dataclass(frozen=True)
class _Span:
    """Time between two rows of an attempt."""

    first: int  # step of the row before it
    last: int
    entries: Mapping[str, float]


def _split(spans: Sequence[_Span], step: int) -> tuple[list[_Span], float]:
    """Return the spans up to a step, and the seconds after it."""
    kept, lost = [], 0.0
    for span in spans:
        steps = span.last - span.first
        share = (min(span.last, step) - span.first) / steps if steps > 0 else span.last <= step
        share = max(0.0, float(share))
        before = {name: share * x for name, x in span.entries.items()}
        kept.append(_Span(span.first, min(span.last, step), before))
        lost += (1 - share) * sum(span.entries.values())
    return kept, lost


def _is_new_attempt(last: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return row["seconds"] < last["seconds"] or row["began"] - last["began"] > _SAME_ATTEMPT


def _since(last: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    before = last["phases"]
    return {name: x - before.get(name, 0.0) for name, x in row["phases"].items()}


def _entries(phases: Mapping[str, float]) -> dict[str, float]:
    return {
        entry: sum(phases.get(phase, 0.0) for phase in names) for entry, names in _ENTRIES.items()
    }


def _add(totals: dict[str, float], entries: Mapping[str, float]) -> None:
    for name, seconds in entries.items():
        totals[name] += seconds
