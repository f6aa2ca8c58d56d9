"""Summary of a run's speed from speed.jsonl: time of a step, rate, first call, memory."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from jtrain.io.formatting import align_columns, format_bytes, format_count, format_seconds
from jtrain.io.jsonl import read_rows


@dataclasses.dataclass(frozen=True)
class SpeedSummary:
    """Speed of a run over all rows of speed.jsonl; None where the file does not say."""

    step: int
    """Step of the newest row."""
    p50: float | None
    """Median seconds of a step: the median of the rows'."""
    p90: float | None
    """Ninth decile of the seconds of a step: the median of the rows'."""
    seconds_per_step: float
    """Median of the rows' means."""
    rate: float
    """Rows or tokens a second: the median of the rows."""
    unit: str
    waiting: float
    """Share of the time that waited for data, 0 to 1: the median of the rows."""
    compile: float | None
    """Seconds of compiling, in the newest attempt with a first row."""
    first_call: float | None
    """Seconds until the first call was done, with reading its batch; no part of the speed."""
    memory: int | None
    """Bytes in use in the newest row."""
    memory_peak: int | None
    memory_of: str | None
    """device or process."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return dataclasses.asdict(self)


def read_speed(path: Path) -> SpeedSummary | None:
    """Return the summary of a speed.jsonl; None if it has no complete row.

    Raises:
        CheckpointError: if a row cannot be read.
    """
    rows = [row for row in read_rows(path) if _has(row, "seconds_per_step")]
    if not rows:
        return None
    unit = "tokens" if any(_has(row, "tokens_per_second") for row in rows) else "rows"
    of = lambda name: [row[name] for row in rows if _has(row, name)]
    middle = lambda name: median(of(name)) if of(name) else None
    newest = lambda name: of(name)[-1] if of(name) else None
    last = rows[-1]
    kind = next((of for of in ("device", "process") if _has(last, f"{of}_memory")), None)
    return SpeedSummary(
        step=last["step"],
        p50=middle("p50"),
        p90=middle("p90"),
        seconds_per_step=median(of("seconds_per_step")),
        rate=middle(f"{unit}_per_second") or 0.0,
        unit=unit,
        waiting=middle("waiting") or 0.0,
        compile=newest("compile"),
        first_call=newest("first_call"),
        memory=newest(f"{kind}_memory"),
        memory_peak=newest(f"{kind}_memory_peak"),
        memory_of=kind,
    )


def format_speed(found: SpeedSummary) -> str:
    """Return the summary as a table; what is unknown is left out."""
    rows: list[tuple[str, str, str]] = []
    if found.p50 is not None and found.p90 is not None:
        rows.append(("a step", format_seconds(found.p50), "median, of steps that are done"))
        rows.append(("", format_seconds(found.p90), "nine of ten steps take at most this"))
    rows.append(("", format_seconds(found.seconds_per_step), "mean, without pauses"))
    rows.append(("rate", f"{format_count(found.rate)}", f"{found.unit} a second"))
    rows.append(("waiting", f"{found.waiting:.1%}", "for data"))
    apart = {"compiling": found.compile, "first call": found.first_call}
    for name, seconds in apart.items():
        if seconds is not None:
            rows.append((name, format_seconds(seconds), "before that, and no part of it"))
    for size, words in ((found.memory, "in use"), (found.memory_peak, "at most so far")):
        if size is not None:
            rows.append(("memory", format_bytes(size), f"of the {found.memory_of}, {words}"))
    return "\n".join([f"speed until step {found.step}", *align_columns(rows, right=(1,))])


def _has(row: Mapping[str, Any], name: str) -> bool:
    return isinstance(row.get(name), int | float)
