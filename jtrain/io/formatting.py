"""Human-readable numbers and tables."""

import math
import re
import signal
from collections.abc import Container, Sequence

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape_controls(text: str) -> str:
    """Return a text that no terminal obeys: control characters are spelled, but tabs and newlines.

    A name, a reason or a token of a stranger's file may hold `\\x1b]52;...`, which sets the
    clipboard, or a query that the terminal answers as if it were typed.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def format_number(x: float | int) -> str:
    """Format a loss or a metric, with four decimals or an exponent: `2.1432`, `1.310e-05`."""
    if not math.isfinite(x):
        return str(float(x))
    return f"{x:.4f}" if x == 0 or 1e-3 <= abs(x) < 1e5 else f"{x:.3e}"


def format_count(x: float | int) -> str:
    """Format a count with three digits: `7.25`, `813`, `52.1k`, `1.25M`."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(x) < 999.5 or unit == "T":
            break
        x /= 1000
    digits = 0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2
    return f"{x:.{digits}f}{unit}"


def format_bytes(number: int) -> str:
    """Format a number of bytes with three digits: `812 B`, `52.1kB`, `1.25MB`."""
    return f"{format_count(number)}B" if number >= 1000 else f"{number} B"


def format_duration(seconds: float | int) -> str:
    """Format seconds as `0:42`, `12:05`, `3:12:05` or `2d 03:12`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def format_seconds(seconds: float) -> str:
    """Format a short time with three digits: `812 us`, `14.2 ms`, `1.85 s`."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{format_count(seconds * factor)} {unit}"
    return f"{format_count(seconds)} s"


def signal_name(number: int) -> str:
    """Return the name of a signal, `SIGKILL`; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def align_columns(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Align rows of cells in columns, right-aligned where the column index is in `right`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:>{width}}" if i in right else f"{cell:{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
