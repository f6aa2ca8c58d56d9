"""Errors that a user can fix, each with what was asked, what was found and what to type.

`jtrain` prints the message of any of these without a traceback and exits with its `code`. A
notebook shows the user's own frames and the message.
"""

import linecache
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from jtrain.errors.spelling import did_you_mean as did_you_mean

# Exit codes: done; what was computed again differs; an error in what was typed; an error that
# another try may not have; stopped, and the same command resumes; ended as it made no progress.
DONE, DIFFERS, MISTAKE, FAULT, STOPPED, HUNG = 0, 1, 2, 70, 75, 124


class UserError(ValueError):
    """Error that the user can fix; never a fault of jtrain."""

    code = MISTAKE

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in the place of its own traceback."""
        frames = frame_lines(self.__traceback__)
        return [*frames.splitlines(), f"{type(self).__name__}: {self}"]


class ConfigError(UserError):
    """Invalid value in a config or an override."""


class DataError(UserError):
    """Data that does not match the config."""


class LossError(UserError):
    """Loss, model or metric that breaks its contract."""


class CodeError(UserError):
    """Failure in a user's function, with the user's frames and what to type."""


class ShardingError(UserError):
    """Array that cannot be sharded over the devices as the strategy asks."""


class CheckpointError(UserError):
    """Checkpoint that is missing, incomplete or of another shape."""


class DamagedError(CheckpointError):
    """Checkpoint whose bytes are not those that were saved; no command repairs it."""

    code = FAULT


class UnreachableError(UserError):
    """File that the system does not let this process read now: nothing is known of its bytes."""

    code = FAULT


class RetraceError(UserError):
    """Arrays of another shape, dtype or structure than the compiled step takes."""


class PeerError(Exception):
    """Missing or ended process of the run; this process cannot fix it."""

    code = FAULT


class DeviceError(Exception):
    """Wrong number computed or stored by a device; no command repairs it."""

    code = FAULT


_PACKAGE = str(Path(__file__).parents[1])
# The standard library and installed packages.
LIBRARIES = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {*site.getsitepackages(), site.getusersitepackages()}
)
_MOST = 8  # frames that are shown


def is_user_file(file: str) -> bool:
    """Return whether a file of code is the user's: no library, not jtrain, not generated."""
    if file.startswith("<"):  # a cell, standard input, `python -c`; others are generated
        return file.startswith(("<ipython", "<stdin", "<string"))
    path = os.path.abspath(file)
    return not path.startswith(tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, *LIBRARIES)))


def user_frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the links of a traceback whose code is the user's, the outermost first."""
    while trace is not None:
        if is_user_file(trace.tb_frame.f_code.co_filename):
            yield trace
        trace = trace.tb_next


def cut_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback with the user's own frames alone."""
    own = None
    for link in reversed(list(user_frames(trace))):
        own = TracebackType(own, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return own


def frame_lines(trace: TracebackType | None) -> str:
    """Return the user's own frames as Python prints them; empty where there is none."""
    found = list(traceback.extract_tb(cut_traceback(trace)))
    if len(found) > _MOST:
        found = [*found[:2], *found[2 - _MOST :]]
    return "".join(traceback.StackSummary.from_list(found).format()).rstrip()


def format_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, as Python prints them."""
    described = traceback.TracebackException.from_exception(error, compact=True)
    lines = "".join(described.format_exception_only()).splitlines()
    if isinstance(error, SyntaxError):  # the line and the caret come first
        return "\n".join(lines)
    first = next((line for line in lines if not line.startswith(" ")), type(error).__name__)
    kind, colon, message = first.partition(":")
    return f"{kind.rpartition('.')[2]}{colon}{message}"


def failing_code(link: TracebackType) -> str:
    """Return the expression of a frame that failed, where it is on one line; else nothing."""
    summary = traceback.extract_tb(link, limit=1)[0]
    begin, end = summary.colno, summary.end_colno
    if begin is None or end is None or summary.lineno is None:
        return ""
    if summary.end_lineno != summary.lineno:
        return ""
    line = linecache.getline(summary.filename, summary.lineno).encode()
    return line[begin:end].decode(errors="replace")


def is_interactive() -> bool:
    """Return whether this Python is interactive, so that an error does not end it."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)
