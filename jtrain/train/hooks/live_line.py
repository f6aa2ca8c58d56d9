"""One line that is drawn again and again, on what can show one: a terminal or a notebook."""

import os
from typing import Any, Protocol, TextIO

BAR = 20  # characters, in a notebook


class LiveLine(Protocol):
    """Where a line is drawn."""

    period: float
    """Seconds between two drawings."""

    def draw(self, done: int, of: int, text: str) -> None:
        """Shows how much is done, as a bar, and the text, in the place of those before."""
        ...

    def print(self, line: str) -> None:
        """Writes a line that stays, above the live one."""
        ...

    def close(self) -> None:
        """Leaves the last drawing, and the stream as it was."""
        ...


def drawing_on(stream: TextIO) -> type["TerminalLine"] | type["NotebookLine"] | None:
    """What draws on `stream`; None where nothing can: a file, a pipe, a terminal that is dumb."""
    if any(cls.__module__.startswith("ipykernel.") for cls in type(stream).__mro__):
        return NotebookLine  # its stream says that it is no terminal, and shows a carriage return
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
        return TerminalLine
    return None


class TerminalLine:
    """By rich, over the whole width; the cursor stays shown, so that not even SIGKILL hides it."""

    period = 0.2

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live("", console=self._console, auto_refresh=False)
        self._live.start()
        self._console.show_cursor(True)

    def draw(self, done: int, of: int, text: str) -> None:
        """A bar as wide as the text leaves room for."""
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
        """As it is, without markup."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Shows the cursor."""
        self._live.stop()


class NotebookLine:
    """By carriage returns, which the output of a cell follows; half a second apart, for they add up
    in the notebook's file until it is saved."""

    period = 0.5

    def __init__(self, stream: TextIO):
        self._stream, self._drawn = stream, ""

    def draw(self, done: int, of: int, text: str) -> None:
        """A short bar, and as many blanks as hide the rest of a longer line."""
        full = min(BAR, BAR * done // max(of, 1))
        self._show("━" * full + "─" * (BAR - full) + "  " + text)

    def print(self, line: str) -> None:
        """In the place of the live line, which is drawn again below it."""
        live = self._drawn
        self._show(line)
        self._drawn = ""
        self._stream.write("\n")
        self._show(live)

    def close(self) -> None:
        """Ends the line."""
        self._stream.write("\n" if self._drawn else "")
        self._stream.flush()

    def _show(self, line: str) -> None:
        if line or self._drawn:
            self._stream.write("\r" + line.ljust(len(self._drawn)))
            self._stream.flush()
        self._drawn = line
