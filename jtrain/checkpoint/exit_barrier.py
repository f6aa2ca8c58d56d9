"""A program that ends while a checkpoint is being written: it ends when that is sealed.

Otherwise Orbax finds that it may start no more threads, says so in its log, and the program exits
with 0 and without its checkpoint (12 of 12 times on Python 3.11 and 3.13). What `atexit` runs comes
too late. What the threads' own list runs comes in time, if it is entered after that of
`concurrent.futures`, for the last one there is run first: hence the import.
"""

import concurrent.futures.thread  # noqa: F401
import os
import sys
import threading
import time
from typing import Protocol, runtime_checkable

from jtrain.checkpoint.thread_task import ThreadTask
from jtrain.errors import FAULT

_PATIENCE = 600.0  # seconds
_LEAVING = 30.0  # seconds from the end of the program on, where a save has failed


@runtime_checkable
class Closeable(Protocol):
    """What is closed at the end."""

    def close(self) -> None:
        """Returns when what was promised is on the disk; raises why it is not."""
        ...


_promised: list[Closeable] = []
_registered = _failed = False


def expect_close(closes: Closeable) -> None:
    """Has it closed at the end of the program; if that fails, its error is told and the code 70."""
    _register()
    if closes not in _promised:
        _promised.append(closes)


def mark_closed(closes: Closeable) -> None:
    """It was closed: nothing is left to do."""
    if closes in _promised:
        _promised.remove(closes)


def save_failed() -> None:
    """Has the program end for certain, with the code 70 if it comes to that.

    Of Orbax's threads one may wait for ever for what failed in another, and Python for it (1 of 12
    runs whose disk failed).
    """
    global _failed
    _failed = True
    _register()


def _register() -> None:
    global _registered
    if not _registered:
        getattr(threading, "_register_atexit")(_keep)  # noqa: B009  it has no public name
        os.register_at_fork(after_in_child=_promised.clear)  # the thread that writes is not there
        _registered = True


def _keep() -> None:
    if _failed:
        threading.Thread(target=_leave, daemon=True).start()
    for closes in list(_promised):
        closing = ThreadTask(closes.close)
        closing.start()
        error = closing.wait(_PATIENCE)
        if error is None and not closing.ended():
            error = TimeoutError(f"a checkpoint was not written in {_PATIENCE:.0f} s")
        if error is not None:
            print(error, file=sys.stderr, flush=True)  # noqa: T201
            sys.stdout.flush()
            os._exit(FAULT)


def _leave() -> None:
    time.sleep(_LEAVING)
    print("a save has failed, and its threads do not end: ended by force", file=sys.stderr)  # noqa: T201
    os._exit(FAULT)
