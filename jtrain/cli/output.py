"""Standard streams whose reader may go: a terminal that is closed, a `tee` that Ctrl-C ends too."""

import contextlib
import io
import sys
from typing import TextIO


def outlive_readers() -> None:
    """Have what can no longer be shown dropped, in place of an error that ends the run.

    Ctrl-C in `jtrain run CONFIG | tee log.txt` ends `tee` at once; the next line that the run shows
    would be a BrokenPipeError, and its checkpoint would not be saved. Likewise EIO of a terminal
    that was closed, and a full disk behind `> log.txt`.
    """
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Outliving(io.FileIO):
    """A file descriptor; what it does not take is dropped."""

    def write(self, data) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return memoryview(data).nbytes


def _outliving(stream: TextIO) -> TextIO:
    try:
        raw = _Outliving(stream.fileno(), "w", closefd=False)
        stream.flush()
    except (AttributeError, OSError, ValueError):  # no stream, closed, or not one of the system
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )
