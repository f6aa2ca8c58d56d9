"""Progress bar: a live line on a terminal or in a notebook."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from jtrain.core.loop import Hook
from jtrain.io.formatting import format_count, format_duration, format_number
from jtrain.train.hooks.live_line import LiveLine, live_line_for
from jtrain.train.hooks.speed import Speed
from jtrain.train.svg_chart import Points


class ProgressBar(Hook):
    """Hook that draws within `with ProgressBar(...) as progress:`, if `stream` can show it.

    The line is redrawn a few times a second and not at every step: each drawing sets `every` to the
    steps of such a period, so that a step in between costs the loop one division. The stream is
    restored however the block ends.

    Args:
        start: the step that the run resumes from.
        stop: the last step of the run.
        speed: gives the speed and the time left.
        valid: gives the newest validation loss, None before the first.
        curves: gives the losses by set and step, for a display that has room for them.
        steps_per_call: steps that the loop takes at once.
        stream: of the terminal or the cell; stdout by default.
        clock: gives seconds.
    """

    last = True

    def __init__(
        self,
        *,
        stop: int,
        start: int = 0,
        speed: Speed | None = None,
        valid: Callable[[], float | None] | None = None,
        curves: Callable[[], Mapping[str, Points]] = dict,
        steps_per_call: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stream = stream or sys.stdout
        self._draws = live_line_for(self.stream)
        self.live = self._draws is not None
        """True if the stream can show a live line."""
        self.every = steps_per_call if self.live else max(stop, 1)
        self._stop, self._step, self._least = stop, start, steps_per_call
        self._speed, self._valid, self._clock = speed, valid, clock
        self._curves = curves
        self._numbers: Mapping[str, float] = {}
        self._drawn, self._drawn_step = clock(), start
        self._doing = "starting"
        self._period = self._draws.period if self._draws else 0.0
        self._display: LiveLine | None = None  # while it draws

    def __enter__(self) -> "ProgressBar":
        if self._draws is not None:
            self._display = self._draws(self.stream)
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._doing = ""
            display = self._display
            try:
                self._draw()
            finally:
                self._display = None
                display.close()

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Show an activity other than training, such as `evaluating`, within the block."""
        before, self._doing = self._doing, what
        self._draw()
        try:
            yield
        finally:
            self._doing = before

    def print(self, line: str) -> None:
        """Print a line above the live one, or plainly if there is none."""
        if self._display is not None:
            self._display.print(line)
        else:
            self.stream.write(line + "\n")
            self.stream.flush()

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Redraw the line if the last drawing is a period old."""
        if not self.live:
            return
        now, self._step, self._numbers, self._doing = self._clock(), step, numbers, ""
        if now - self._drawn >= self._period or step >= self._stop:
            self.every = self._steps_per_period(step - self._drawn_step, now - self._drawn)
            self._drawn, self._drawn_step = now, step
            self._draw()
        while self.every > self._least and self.every > self._stop - step:
            self.every //= 2  # so that the last step is drawn

    def _steps_per_period(self, steps: int, seconds: float) -> int:
        """Return the most steps within a period that are a power of two times the least."""
        calls = int(steps * min(1.0, self._period / seconds) / self._least) if seconds > 0 else 1
        return self._least << max(0, calls.bit_length() - 1)

    def _draw(self) -> None:
        if self._display is not None:
            self._display.draw(self._step, self._stop, self._text(), self._curves())

    def _text(self) -> str:
        cells = [f"{self._step}/{self._stop}"]
        if "loss" in self._numbers:
            cells.append(f"loss {format_number(self._numbers['loss'])}")
        valid = self._valid() if self._valid else None
        if valid is not None:
            cells.append(f"valid {format_number(valid)}")
        if self._speed and self._speed.pace:
            pace, unit = self._speed.pace, self._speed.unit
            rate = pace.rows_per_second if unit == "rows" else pace.tokens_per_second
            cells.append(f"{format_count(rate or 0)} {unit}/s")
            if self._step < self._stop:
                cells.append(f"{format_duration(pace.left)} left")
        return "  ".join([*cells, self._doing] if self._doing else cells)
