"""Log of a run: a line of metrics at a cadence, and the log file."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from jtrain.core.loop import Hook
from jtrain.io.formatting import (
    escape_controls,
    format_count,
    format_duration,
    format_number,
    format_seconds,
)
from jtrain.io.redact import redact
from jtrain.io.regular_files import open_regular
from jtrain.train.hooks.speed import Speed, SpeedReading


class LogHook(Hook):
    """Hook that logs a line for steps `every`, 2 `every`, ... and the last, in columns.

    `step   400/2000  loss   2.1432  valid   2.2011  lr 9.80e-04   52.1k tokens/s ...`

    Args:
        every: steps.
        stop: the last step of the run.
        log: takes a line.
        speed: gives the speed, the time left and the share of time spent waiting for data.
        valid: gives the newest validation loss, None before the first.
        learning_rate: after a number of updates; None to show none.
    """

    last = True

    def __init__(
        self,
        *,
        every: int,
        stop: int,
        log: Callable[[str], None],
        speed: Speed | None = None,
        valid: Callable[[], float | None] | None = None,
        learning_rate: Callable[[int], float] | None = None,
    ):
        self.every = every
        self._stop, self._log, self._speed = stop, log, speed
        self._valid, self._learning_rate = valid, learning_rate

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a line."""
        cells = [f"step {step:>{len(str(self._stop))}}/{self._stop}"]
        cells.append(f"loss {format_number(numbers['loss']):>8}")
        if self._valid is not None:
            cells.append(f"valid {_or_blank(self._valid(), format_number):>8}")
        if self._learning_rate is not None:
            cells.append(f"lr {float(self._learning_rate(updates_before(step, numbers))):.2e}")
        if self._speed is not None:
            cells += _speed_cells(self._speed)
        if numbers.get("skipped", 0) > 0:
            cells.append(f"skipped {numbers['skipped']:.0f}")
        self._log("  ".join(cells).rstrip())


def updates_before(step: int, numbers: Mapping[str, float]) -> int:
    """Return the updates before that of a step: a schedule counts these, and no skipped step."""
    return max(step - 1 - int(numbers.get("skipped", 0)), 0)


class LogLines:
    """Writer of lines to a log file and to the screen.

    `print` is for what a person must see. `note` is for what a live progress line shows already; it
    skips a screen that has one.

    Args:
        path: the file, which a resumed run appends to; None to write none.
        screen: takes a line for the screen (`Progress.print`); plain stdout by default.
        live: whether the screen has a live line.
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        screen: Callable[[str], None] | None = None,
        live: bool = False,
    ):
        self._path = Path(path) if path else None
        self._screen, self._live = screen or _stdout, live
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def print(self, line: str) -> None:
        """Write a line to the file and to the screen."""
        self._screen(self.write(line))

    def note(self, line: str) -> None:
        """Write a line to the file, and to the screen unless it has a live line."""
        line = self.write(line)
        if not self._live:
            self._screen(line)

    def write(self, line: str) -> str:
        """Write a line to the file only; return it as written, with secrets redacted."""
        line = escape_controls(redact(line))
        if self._path:
            with (
                contextlib.suppress(OSError),  # a full disk is reported by the saves, on the screen
                open_regular(self._path, "ab") as file,
            ):
                file.write(f"{line}\n".encode("utf-8", "replace"))
        return line


def _speed_cells(speed: Speed) -> list[str]:
    pace = speed.pace
    rate = pace and (pace.rows_per_second if speed.unit == "rows" else pace.tokens_per_second)
    return [
        f"{_or_blank(rate, format_count):>6} {speed.unit}/s",
        *_quantile_cells(pace),
        *_utilization_cells(pace),
        f"{_or_blank(pace and pace.left, format_duration):>8} left",
        f"waiting {_or_blank(pace and pace.waiting, '{:.1%}'.format):>6}",
    ]


def _quantile_cells(pace: SpeedReading | None) -> list[str]:
    """Return the median and the ninth decile of the time of a step."""
    if pace is None or pace.p50 is None or pace.p90 is None:
        return []
    return [f"p50 {format_seconds(pace.p50):>7}", f"p90 {format_seconds(pace.p90):>7}"]


def _utilization_cells(pace: SpeedReading | None) -> list[str]:
    """Return MFU, and HFU where the backward pass computes something again."""
    if pace is None or pace.mfu is None:
        return []
    cells = [f"mfu {pace.mfu:.1%}"]
    if pace.hfu is not None and pace.hfu > 1.005 * pace.mfu:
        cells.append(f"hfu {pace.hfu:.1%}")
    return cells


def _or_blank(x: float | None, text: Callable[[float], str]) -> str:
    return "-" if x is None else text(x)


def _stdout(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
