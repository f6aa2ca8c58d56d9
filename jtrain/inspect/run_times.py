"""Times of a run, for `jtrain show RUN --speed` and `--ledger`: its speed, and its time ledger."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jtrain.errors import CheckpointError
from jtrain.io.formatting import (
    align_columns,
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
)
from jtrain.io.jsonl import read_rows


def read_speed(path: Path) -> dict[str, Any] | None:
    """Return the speed of a run over the rows of its speed.jsonl; None without a complete row.

    Times are seconds. `p50` and `p90` of a step, `seconds_per_step`, the `rate` in `unit`s a second
    and the share `waiting` for data are medians of the rows; `step`, `compile`, `first_call` and
    the memory are the newest. What no row has is None.

    Raises:
        CheckpointError: if a row cannot be read.
    """
    has = lambda row, name: isinstance(row.get(name), int | float)
    rows = [row for row in read_rows(path) if has(row, "seconds_per_step")]
    if not rows:
        return None
    columns = {name: [r[name] for r in rows if has(r, name)] for name in set().union(*rows)}
    middle = lambda name: median(columns[name]) if columns.get(name) else None
    newest = lambda name: columns[name][-1] if columns.get(name) else None
    unit = "tokens" if columns.get("tokens_per_second") else "rows"
    kind = next((x for x in ("device", "process") if has(rows[-1], f"{x}_memory")), None)
    return {
        "step": rows[-1]["step"],
        **{name: middle(name) for name in ("p50", "p90", "seconds_per_step")},
        "rate": middle(f"{unit}_per_second") or 0.0,
        "unit": unit,
        "waiting": middle("waiting") or 0.0,
        **{name: newest(name) for name in ("compile", "first_call")},
        "memory": newest(f"{kind}_memory"),
        "memory_peak": newest(f"{kind}_memory_peak"),
        "memory_of": kind,
    }


def format_speed(found: Mapping[str, Any]) -> str:
    """Return the speed as a table; what is unknown is left out."""
    of, before = f"of the {found['memory_of']}", "before that, and no part of it"
    rows = [
        ("a step", "p50", format_seconds, "median, of steps that are done"),
        ("", "p90", format_seconds, "nine of ten steps take at most this"),
        ("", "seconds_per_step", format_seconds, "mean, without pauses"),
        ("rate", "rate", format_count, f"{found['unit']} a second"),
        ("waiting", "waiting", "{:.1%}".format, "for data"),
        ("compiling", "compile", format_seconds, before),
        ("first call", "first_call", format_seconds, before),
        ("memory", "memory", format_bytes, f"{of}, in use"),
        ("memory", "memory_peak", format_bytes, f"{of}, at most so far"),
    ]
    known = [(a, spell(found[key]), b) for a, key, spell, b in rows if found[key] is not None]
    return "\n".join([f"speed until step {found['step']}", *align_columns(known, right=(1,))])


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
