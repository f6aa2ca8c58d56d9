"""Output of a verb: text for a terminal, and streams whose reader may disappear."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jtrain.io.formatting import escape_controls

if TYPE_CHECKING:
    from jtrain.config.resolve import ResolvedConfig

STDOUT, STDERR = 1, 2  # file descriptors


def print_text(
    *words: object, end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print as `print` does, with control characters escaped: a run or a file may be a stranger's.

    Modules of this package import it `as print`.
    """
    print(escape_controls(" ".join(map(str, words)) + end), end="", file=file, flush=flush)


def print_line(line: str) -> None:
    """Print a line at once."""
    print_text(line, flush=True)


def print_error(line: str) -> None:
    """Print a line to stderr."""
    print_text(line, file=sys.stderr, flush=True)


def resolve_config(path: str, words: Sequence[str]) -> "ResolvedConfig":
    """Resolve a config and print its notes to stderr."""
    from jtrain.config.resolve import resolve

    resolved = resolve(Path(path), words)
    for note in resolved.notes:
        print_error(note)
    return resolved


def is_first_process() -> bool:
    """Return whether this process prints the results: the first process does."""
    import jax

    return jax.process_index() == 0


@contextlib.contextmanager
def redirect_output() -> Iterator[None]:
    """Redirect stdout to stderr: gloo prints its connections to stdout from C++."""
    sys.stdout.flush()
    stdout = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, STDOUT)
        os.close(stdout)


def outlive_readers() -> None:
    """Drop output that can no longer be shown instead of raising an error that ends the run.

    Ctrl-C in `jtrain run CONFIG | tee log.txt` ends `tee` at once; the next line of output
    would raise BrokenPipeError, and the checkpoint would not be saved. The same holds for EIO from
    a closed terminal, and for a full disk behind `> log.txt`.
    """
    sys.stdout, sys.stderr = _make_lossy(sys.stdout), _make_lossy(sys.stderr)


def fill_closed_streams() -> None:
    """Open the null device in place of each standard stream that is closed (`>&-`, daemons).

    Otherwise the next file that is opened, a checkpoint say, takes the number of the stream, and
    gets what C libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


class _LossyFile(io.FileIO):
    """A file descriptor that drops what it cannot write."""

    def write(self, data) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return memoryview(data).nbytes


def _make_lossy(stream: TextIO) -> TextIO:
    try:
        raw = _LossyFile(stream.fileno(), "w", closefd=False)
        stream.flush()
    except (AttributeError, OSError, ValueError):  # no stream, closed, or without a descriptor
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",  # of a terminal that has no curves, for example
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )
