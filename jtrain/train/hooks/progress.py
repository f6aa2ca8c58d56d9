"""A live line, on a terminal or in a notebook: how far a run is, and how it goes."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from jtrain.core.loop import Hook
from jtrain.io.formatting import count, duration, number
from jtrain.train.hooks.live_line import LiveLine, drawing_on
from jtrain.train.hooks.speed import Speed


class ProgressBar(Hook):
    """Draws within `with ProgressBar(...) as progress:`; where `stream` cannot show it, nothing.

    It looks a few times a second and not at every step: each drawing sets `every` to the steps that
    were taken in so long, so that a step between two looks costs the loop one division. However the
    block ends, the stream is as before.

    Args:
        start: the step that the run goes on from.
        stop: its last step.
        speed: read for the pace and the time left.
        valid: gives the newest validation loss, None while there is none.
        steps_per_call: steps that the loop takes at once.
        stream: of the terminal or the cell; stdout by default.
        clock: gives seconds.
    """

    def __init__(
        self,
        *,
        stop: int,
        start: int = 0,
        speed: Speed | None = None,
        valid: Callable[[], float | None] | None = None,
        steps_per_call: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stream = stream or sys.stdout
        self._draws = drawing_on(self.stream)
        self.live = self._draws is not None
        """Whether there is what to draw on."""
        self.every = steps_per_call if self.live else max(stop, 1)
        self._stop, self._step, self._least = stop, start, steps_per_call
        self._speed, self._valid, self._clock = speed, valid, clock
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
        """Shows that something other than training goes on: `evaluating`."""
        before, self._doing = self._doing, what
        self._draw()
        try:
            yield
        finally:
            self._doing = before

    def print(self, line: str) -> None:
        """Writes a line above the live one, or plainly where there is none."""
        if self._display is not None:
            self._display.print(line)
        else:
            self.stream.write(line + "\n")
            self.stream.flush()

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Looks, and draws if the last drawing is old."""
        if not self.live:
            return
        now, self._step, self._numbers, self._doing = self._clock(), step, numbers, ""
        if now - self._drawn >= self._period or step >= self._stop:
            self.every = self._steps_in_a_period(step - self._drawn_step, now - self._drawn)
            self._drawn, self._drawn_step = now, step
            self._draw()
        while self.every > self._least and self.every > self._stop - step:
            self.every //= 2  # so that one of the looks is at the last step

    def _steps_in_a_period(self, steps: int, seconds: float) -> int:
        """The most steps that take no longer than a period, of those that halve to the least."""
        calls = int(steps * min(1.0, self._period / seconds) / self._least) if seconds > 0 else 1
        return self._least << max(0, calls.bit_length() - 1)

    def _draw(self) -> None:
        if self._display is not None:
            self._display.draw(self._step, self._stop, self._text())

    def _text(self) -> str:
        cells = [f"{self._step}/{self._stop}"]
        if "loss" in self._numbers:
            cells.append(f"loss {number(self._numbers['loss'])}")
        valid = self._valid() if self._valid else None
        if valid is not None:
            cells.append(f"valid {number(valid)}")
        if self._speed and self._speed.pace:
            pace, unit = self._speed.pace, self._speed.unit
            rate = pace.rows_per_second if unit == "rows" else pace.tokens_per_second
            cells.append(f"{count(rate or 0)} {unit}/s")
            if self._step < self._stop:
                cells.append(f"{duration(pace.left)} left")
        return "  ".join([*cells, self._doing] if self._doing else cells)
