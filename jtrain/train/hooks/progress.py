"""Progress bar: a live line on a terminal or in a notebook."""

import contextlib
import html
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TextIO

from jtrain.core.loop import Hook
from jtrain.io.formatting import format_count, format_duration, format_number
from jtrain.train.hooks.speed import Speed
from jtrain.train.svg_chart import Points, chart


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


BAR = 20  # characters, in a notebook


class LiveLine(Protocol):
    """Display of a line."""

    period: float
    """Seconds between two drawings."""

    def draw(self, done: int, of: int, text: str, curves: Mapping[str, Points]) -> None:
        """Redraw the line: a bar for `done` of `of`, the text, and where there is room the curves.

        Args:
            curves: loss by step, for each set.
        """
        ...

    def print(self, line: str) -> None:
        """Print a permanent line above the live one."""
        ...

    def close(self) -> None:
        """Leave the last drawing in place and restore the stream."""
        ...


def live_line_for(
    stream: TextIO,
) -> type["TerminalLine"] | type["NotebookLine"] | type["LiveCell"] | None:
    """Return the class that draws on `stream`; None for a file, a pipe or a dumb terminal."""
    if any(cls.__module__.startswith("ipykernel.") for cls in type(stream).__mro__):
        # A stream that is no tty, but follows carriage returns.
        return LiveCell if has_rich_output() else NotebookLine
    if "JPY_PARENT_PID" in os.environ:
        return None  # `!jtrain run` in a cell, which does not follow the cursor of its terminal
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
        return TerminalLine
    return None


class TerminalLine:
    """Line drawn by rich, over the full width; the cursor stays visible, even after SIGKILL."""

    period = 0.2

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live("", console=self._console, auto_refresh=False)
        self._live.start()
        self._console.show_cursor(True)

    def draw(self, done: int, of: int, text: str, curves: Mapping[str, Points]) -> None:
        """Redraw the line; the bar fills the width that the text leaves."""
        del curves
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(ratio=1, min_width=4)
        line.add_column(no_wrap=True, overflow="crop")
        bar: Any = ProgressBar(total=max(of, 1), completed=done)
        line.add_row(bar, Text(text, no_wrap=True, overflow="crop"))
        self._live.update(line, refresh=True)

    def print(self, line: str) -> None:
        """Print a line above the live one, without markup."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop drawing; the cursor stays visible."""
        self._live.stop()


class NotebookLine:
    """Line drawn with carriage returns, in a kernel whose cells show text alone.

    Drawings are half a second apart, because they add up in the notebook's file until it is saved.
    """

    period = 0.5

    def __init__(self, stream: TextIO):
        self._stream, self._drawn = stream, ""

    def draw(self, done: int, of: int, text: str, curves: Mapping[str, Points]) -> None:
        """Redraw the line, padded to cover a longer one."""
        del curves
        full = min(BAR, BAR * done // max(of, 1))
        self._show("━" * full + "─" * (BAR - full) + "  " + text)

    def print(self, line: str) -> None:
        """Print a line in place of the live one, which is redrawn below."""
        live = self._drawn
        self._show(line)
        self._drawn = ""
        self._stream.write("\n")
        self._show(live)

    def close(self) -> None:
        """End the line."""
        self._stream.write("\n" if self._drawn else "")
        self._stream.flush()

    def _show(self, line: str) -> None:
        if line or self._drawn:
            self._stream.write("\r" + line.ljust(len(self._drawn)))
            self._stream.flush()
        self._drawn = line


def has_rich_output() -> bool:
    """Return whether the cells of this process show HTML: whether it is a kernel of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


class LiveCell:
    """Output of a cell that is replaced at each drawing, so that a long run adds nothing to it.

    Lines that are printed stand below it.
    """

    period = 0.5

    def __init__(self, stream: TextIO):
        self._stream, self._handle = stream, None

    def draw(self, done: int, of: int, text: str, curves: Mapping[str, Points]) -> None:
        """Redraw the bar and the text, with the curves under them."""
        from IPython.display import display

        data = {"text/html": _page(done, of, text, curves), "text/plain": text}
        if self._handle is None:
            self._handle: Any = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def print(self, line: str) -> None:
        """Print a line below the drawing."""
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the last drawing in place."""
        self._stream.flush()


class LossCurve(Hook):
    """Hook that keeps the loss by step, at most `most` points over the whole run.

    Where there are more, each second one is dropped, and from then on each second one is kept.

    Args:
        every: steps between two points.
        earlier: points before the step that the run resumes from.
        valid: gives the losses of the validation set by step.
    """

    last = True
    most = 200

    def __init__(
        self,
        *,
        every: int,
        earlier: Points | None = None,
        valid: Callable[[], Points] = dict,
    ):
        self.every, self._valid = every, valid
        self._points: dict[int, float] = {}
        for step, loss in (earlier or {}).items():
            self.on_numbers(step, {"loss": loss})

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the loss of a step."""
        if "loss" not in numbers:
            return
        self._points[step] = numbers["loss"]
        if len(self._points) > self.most:
            self._points = dict(list(self._points.items())[::2])
            self.every *= 2

    def curves(self) -> Mapping[str, Points]:
        """Return the losses by set and step."""
        return {"train": self._points, "valid": self._valid()}


def _page(done: int, of: int, text: str, curves: Mapping[str, Points]) -> str:
    share = 100 * done / max(of, 1)
    return (
        '<div style="max-width:760px">'
        '<div style="height:6px;border-radius:3px;background:rgba(128,128,128,.25)">'
        f'<div style="height:6px;border-radius:3px;background:#1f77b4;width:{share:.1f}%"></div>'
        f'</div><code style="white-space:pre-wrap">{html.escape(text)}</code></div>'
        f"{chart('loss', curves)}"
    )
