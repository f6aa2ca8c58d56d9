"""Live line: one line that is redrawn in place, on a terminal or in a notebook."""

import os
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from jtrain.train.hooks.live_cell import LiveCell, has_rich_output
from jtrain.train.svg_chart import Points

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
) -> type["TerminalLine"] | type["NotebookLine"] | type[LiveCell] | None:
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
