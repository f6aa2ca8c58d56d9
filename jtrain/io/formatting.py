"""Numbers and tables as people read them."""

import math
from collections.abc import Container, Sequence


def number(x: float | int) -> str:
    """A loss or a metric, four decimals where that says something: `2.1432`, `1.310e-05`."""
    if not math.isfinite(x):
        return str(float(x))
    return f"{x:.4f}" if x == 0 or 1e-3 <= abs(x) < 1e5 else f"{x:.3e}"


def count(x: float | int) -> str:
    """Three digits of a count: `7.25`, `813`, `52.1k`, `1.25M`."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(x) < 999.5 or unit == "T":
            break
        x /= 1000
    digits = 0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2
    return f"{x:.{digits}f}{unit}"


def size(number: int) -> str:
    """Bytes in three digits: `812 B`, `52.1kB`, `1.25MB`."""
    return f"{count(number)}B" if number >= 1000 else f"{number} B"


def duration(seconds: float | int) -> str:
    """Seconds as `0:42`, `12:05`, `3:12:05` or `2d 03:12`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def brief(seconds: float) -> str:
    """A short time in three digits: `812 us`, `14.2 ms`, `1.85 s`."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{count(seconds * factor)} {unit}"
    return f"{count(seconds)} s"


def columns(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """A line for each row, its cells under one another; those of the columns `right` end alike."""
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:>{w}}" if i in right else f"{cell:{w}}"
            for i, (cell, w) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]
