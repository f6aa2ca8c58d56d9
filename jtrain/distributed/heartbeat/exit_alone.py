"""Exit of one of several processes without waiting for the others.

At the end of Python JAX makes a process wait 300 s for the others, also after an error: they wait
in a collective for the failed process, and nobody hears of the error until then.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from jtrain.distributed.heartbeat.heartbeat import HEARTBEAT
from jtrain.errors import DeviceError, PeerError, UserError

_code: int | None = None  # exit code of the uncaught error
_previous: Callable[..., object] | None = None  # the previous excepthook


def fail_alone() -> None:
    """Make an uncaught error end this process, after its traceback, without the others.

    The threads end first, and handlers registered with `atexit` after this call run; earlier ones
    do not, JAX's shutdown among them: call this after importing JAX. `SystemExit` does not reach
    this hook: call `exit_alone` instead. Ctrl-C is unchanged.
    """
    global _previous
    if _previous is None:
        _previous, sys.excepthook = sys.excepthook, _excepthook
        atexit.register(_exit)


def exit_alone(code: int) -> NoReturn:
    """Exit with a code that is not 0, without waiting for other processes."""
    HEARTBEAT.note_failure()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()
    os._exit(code)


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global _code
    interactive = hasattr(sys, "ps1")  # an error at a prompt ends nothing
    if isinstance(error, Exception) and not interactive:
        HEARTBEAT.note_failure()
        # The codes of the command line.
        _code = error.code if isinstance(error, UserError | PeerError | DeviceError) else 1
    (_previous or sys.__excepthook__)(kind, error, trace)


def _exit() -> None:
    if _code is not None:
        exit_alone(_code)
