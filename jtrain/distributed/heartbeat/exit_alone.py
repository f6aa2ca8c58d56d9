"""One of several processes that fails ends by itself.

At the end of Python JAX has a process wait 300 s for the others, also where an error ended it: they
wait in a sum for the one that failed, and nobody is told of the error until then.
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

_code: int | None = None  # of an error that nobody caught
_before: Callable[..., object] | None = None  # tells of it


def fail_alone() -> None:
    """From now on an error that nobody catches, once told, ends this process without the others.

    Its threads end first, and what was registered with `atexit` after this call runs; what was
    registered before does not, JAX's own end among it: call it when JAX was imported. Of a
    `SystemExit` nobody is told: `exit_alone` in its place. Ctrl-C is as before.
    """
    global _before
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _tell
        atexit.register(_leave)


def exit_alone(code: int) -> NoReturn:
    """Ends this process with an exit code that is not 0, and waits for nobody."""
    HEARTBEAT.fails()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, gone or closed
            stream.flush()
    os._exit(code)


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _code
    if isinstance(error, Exception) and not hasattr(sys, "ps1"):  # at a prompt nothing ends by it
        HEARTBEAT.fails()
        known = isinstance(error, UserError | PeerError | DeviceError)  # as from the command line
        _code = error.code if known else 1
    (_before or sys.__excepthook__)(kind, error, trace)


def _leave() -> None:
    if _code is not None:
        exit_alone(_code)
