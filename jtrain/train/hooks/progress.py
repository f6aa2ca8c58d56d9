"""Progress display: a live bar on a terminal, drawn by rich, or in a notebook, as HTML."""

import contextlib
import html
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from jtrain.core.loop import Hook
from jtrain.io.formatting import format_count, format_duration, format_number
from jtrain.train.hooks.speed import Speed


class ProgressBar(Hook):
    """Hook that draws within `with ProgressBar(...) as progress:`, if `stream` can show it.

    A terminal and a cell of a notebook have one line, which is replaced, beside the lines that are
    printed. A file and a pipe have the printed lines alone.

    The display is redrawn a few times a second and not at every step: each drawing sets `every` to
    the steps of such a period, so that a step in between costs the loop one division.

    Args:
        start: the step that the run resumes from.
        stop: the last step of the run.
        speed: gives the speed and the time left.
        valid: gives the newest validation loss, None before the first.
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
        valid: Callable[[], float | None] = lambda: None,
        steps_per_call: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stream = stream or sys.stdout
        self._cell = _is_cell(self.stream)
        self.live = self._cell or _is_terminal(self.stream)
        """True if the stream can show a live display."""
        self.every = steps_per_call if self.live else max(stop, 1)
        self._stop, self._step, self._least = stop, start, steps_per_call
        self._speed, self._valid, self._clock = speed, valid, clock
        self._numbers: Mapping[str, float] = {}
        self._drawn, self._drawn_step = clock(), start
        self._doing = "starting"
        self._period = 0.5 if self._cell else 0.2  # seconds between two drawings
        self._draws = False
        self._terminal: Any = None  # rich's Live
        self._output: Any = None  # IPython's handle of the output of the cell

    def __enter__(self) -> "ProgressBar":
        if self.live and not self._cell:
            from rich.console import Console
            from rich.live import Live

            self._terminal = Live("", console=Console(file=self.stream), auto_refresh=False)
            self._terminal.start()
            self._terminal.console.show_cursor(True)  # also after SIGKILL
        self._draws = self.live
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._doing = ""
        try:
            self._draw()
        finally:
            self._draws = False
            if self._terminal is not None:
                self._terminal.stop()
                self._terminal = None

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
        """Print a line above the live one of a terminal, or plainly."""
        if self._terminal is not None:
            self._terminal.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self.stream.write(line + "\n")
            self.stream.flush()

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Redraw the display if the last drawing is a period old."""
        if not self.live:
            return
        now, self._step, self._numbers, self._doing = self._clock(), step, numbers, ""
        if now - self._drawn >= self._period or step >= self._stop:
            self.every = self._steps_per_period(step - self._drawn_step, now - self._drawn)
            self._drawn, self._drawn_step = now, step
            self._draw()

    def _steps_per_period(self, steps: int, seconds: float) -> int:
        """Return the most steps within a period that are a power of two times the least."""
        calls = int(steps * min(1.0, self._period / seconds) / self._least) if seconds > 0 else 1
        return self._least << max(0, calls.bit_length() - 1)

    def _draw(self) -> None:
        if self._terminal is not None:
            self._terminal.update(self._line(), refresh=True)
        elif self._draws:
            self._draw_cell()

    def _draw_cell(self) -> None:
        """Replace the output of the cell, so that a long run adds nothing to the notebook."""
        from IPython.display import display

        bar = f'<progress value="{self._step}" max="{max(self._stop, 1)}"></progress>'
        line = f"<div>{bar} <code>{html.escape(self._text())}</code></div>"
        data = {"text/html": line, "text/plain": self._text()}
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)

    def _line(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(ratio=1, min_width=4)
        line.add_column(no_wrap=True, overflow="crop")
        bar: Any = ProgressBar(total=max(self._stop, 1), completed=self._step)
        line.add_row(bar, Text(self._text(), no_wrap=True, overflow="crop"))
        return line

    def _text(self) -> str:
        cells = [f"{self._step}/{self._stop}"]
        if "loss" in self._numbers:
            cells.append(f"loss {format_number(self._numbers['loss'])}")
        if (valid := self._valid()) is not None:
            cells.append(f"valid {format_number(valid)}")
        if self._speed and self._speed.pace:
            cells.append(f"{format_count(self._speed.rate)} {self._speed.unit}/s")
            if self._step < self._stop:
                cells.append(f"{format_duration(self._speed.pace.left)} left")
        return "  ".join([*cells, self._doing] if self._doing else cells)


def _is_cell(stream: TextIO) -> bool:
    """Return whether a stream is that of a cell which shows HTML: of a kernel of IPython."""
    ipython = sys.modules.get("IPython")
    kernel = any(cls.__module__.startswith("ipykernel.") for cls in type(stream).__mro__)
    return kernel and ipython is not None and ipython.get_ipython() is not None


def _is_terminal(stream: TextIO) -> bool:
    if "JPY_PARENT_PID" in os.environ:
        return False  # `!jtrain run` in a cell, which does not follow the cursor of its terminal
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
