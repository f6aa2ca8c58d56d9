"""One of several processes that fails ends by itself.

At the end of Python JAX has a process wait 300 s for the others, also where an error ended it: they
wait in a sum for the one that failed, and nobody is told of the error until then.
"""

import atexit
import os
import sys
from types import TracebackType

from jtrain.errors import INTERRUPTED, DeviceError, PeerError, UserError

_failed: list[int] = []  # the exit code, once there is one
_before = sys.excepthook


def fail_alone() -> None:
    """From now on an error that nobody catches is told, and ends this process a moment later.

    What was registered with `atexit` after this call runs before. Call it when JAX was imported.
    """
    global _before
    if sys.excepthook is not _tell:
        _before, sys.excepthook = sys.excepthook, _tell
        atexit.register(_leave)


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _before(kind, error, trace)
    known = isinstance(error, UserError | PeerError | DeviceError)  # as from the command line
    usual = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    _failed.append(error.code if known else usual)


def _leave() -> None:
    if _failed:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_failed[0])
