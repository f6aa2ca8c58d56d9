"""The log: Python's logger `jtrain`, and the handler that a run adds to it.

A handler of the user's own on this logger, or on the root, gets the same records.
"""

import contextlib
import io
import logging
import sys
from pathlib import Path
from typing import Protocol, TextIO

from jtrain.io.formatting import escape_controls
from jtrain.io.redact import redact
from jtrain.io.regular_files import open_regular

LOG = logging.getLogger("jtrain")
if LOG.level == logging.NOTSET:
    LOG.setLevel(logging.INFO)


def clean(record: logging.LogRecord) -> bool:
    """Remove secrets and control characters from a record; a console prints it once.

    absl, which Orbax brings, gives the root a handler on stderr at its first message. While a run
    prints its lines they go on only to handlers that are not a console.
    """
    record.msg, record.args = escape_controls(redact(record.getMessage())), ()
    LOG.propagate = not _runs or not all(map(_is_console, logging.root.handlers))
    return True


def _is_console(handler: logging.Handler) -> bool:
    consoles = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    return getattr(handler, "stream", None) in consoles or "absl" in type(handler).__module__


LOG.addFilter(clean)
_runs: "list[RunLog]" = []


def log_progress(line: str) -> None:
    """Log a line that a live display shows already: it skips a screen that has one."""
    LOG.info(line, extra={"progress": True})


class Display(Protocol):
    """Live display, above which lines are printed."""

    live: bool
    """Whether the stream can show a live line."""

    def print(self, line: str) -> None:
        """Print a line above the live one."""
        ...


class RunLog(logging.Handler):
    """Handler of a run, in a `with` block: it writes the run's file, and prints on the screen.

    Of nested runs the inner one gets the records. Lines before `open` are kept for the file.

    Args:
        screen: stream to print to; standard output by default, or None for a closed one.
        keep_lines: whether lines are kept for a file; not for a run in memory, which opens none.
    """

    def __init__(
        self, screen: TextIO | None = None, *, shows: bool = True, keep_lines: bool = True
    ):
        super().__init__()
        self.addFilter(clean)
        self._screen, self._shows = screen, shows
        self._path: Path | None = None
        self._kept: list[str] | None = [] if keep_lines else None
        self.display: Display | None = None
        """The live display, while there is one."""

    def __enter__(self) -> "RunLog":
        LOG.addHandler(self)
        _runs.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _runs.remove(self)
        LOG.removeHandler(self)

    @property
    def stream(self) -> TextIO:
        """Stream that is printed to; a buffer where this process prints nothing."""
        stream = self._screen or sys.stdout  # None if it was closed
        return stream if stream and self._shows else io.StringIO()

    def open(self, path: Path) -> None:
        """Append all lines to a file, those that were logged before too."""
        self._path, kept, self._kept = path, self._kept, None
        for line in kept or ():
            self._write(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Write and print a record."""
        if _runs[-1] is not self:
            return
        line = record.getMessage()
        if self._path is not None:
            self._write(line)
        elif self._kept is not None:
            self._kept.append(line)
        if not self._shows:
            return
        display = self.display
        if display is None:
            stream = self.stream
            with contextlib.suppress(OSError, ValueError):  # it was closed
                stream.write(f"{line}\n")
                stream.flush()
        elif not (display.live and getattr(record, "progress", False)):
            display.print(line)

    def _write(self, line: str) -> None:
        assert self._path is not None, "opened"
        with (
            contextlib.suppress(OSError),  # a full disk is reported by the saves, on the screen
            open_regular(self._path, "ab") as file,
        ):
            file.write(f"{line}\n".encode("utf-8", "replace"))
