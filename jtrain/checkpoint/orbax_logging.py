"""Keeps what Orbax and its event loops complain of off the screen: all that fails is raised.

One write that fails makes hundreds of lines: of each other write that was under way asyncio says
that its task or future was never asked, Python that a coroutine was never awaited, and TensorStore
that its event loop is closed.
"""

import contextlib
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"  # in the path of each of its files
_STORE = re.compile("[A-Z_]+: Error (opening|reading|writing) ")  # so TensorStore's errors begin


def silence() -> None:
    """Drops from now on what is logged and printed of Orbax's failures, and nothing else."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _of_others not in logger.filters:
            logger.addFilter(_of_others)
    never = r"coroutine '\w*serialize\w*(\.<locals>\.\w+)?' was never awaited"
    warnings.filterwarnings("ignore", never, RuntimeWarning)  # the same one again adds nothing
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences all that asyncio and Python say of the tasks that a failed read leaves behind."""
    loop, hook = logging.getLogger("asyncio"), sys.unraisablehook
    disabled = loop.disabled
    loop.disabled, sys.unraisablehook = True, lambda _: None
    try:
        yield
    finally:
        loop.disabled, sys.unraisablehook = disabled, hook


class _Hook:
    """Passes on what Python cannot raise, but for what Orbax and TensorStore leave of a write."""

    def __init__(self, before: Callable[[Any], object]):
        self._before = before

    def __call__(self, told: Any) -> None:
        error = told.exc_value
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (_of_orbax(error) or (closed and told.object is None)):
            self._before(told)


def _of_others(record: logging.LogRecord) -> bool:
    """Whether neither the line nor the error that it tells of comes from Orbax."""
    error = record.exc_info[1] if record.exc_info else None
    return not (_of_orbax(error) or _ORBAX in record.pathname or _tells_of_task(record))


def _tells_of_task(record: logging.LogRecord) -> bool:
    """Whether it is asyncio's word of a task of Orbax, which it names by its file."""
    with contextlib.suppress(TypeError, ValueError):  # wrong arguments, of which logging tells
        return record.name == "asyncio" and _ORBAX in record.getMessage()
    return False


def _of_orbax(error: BaseException | None) -> bool:
    """Whether it went through Orbax, or was made by TensorStore outside Python."""
    if error is None:
        return False
    if error.__traceback__ is None:
        return _STORE.match(str(error)) is not None
    return any(_ORBAX in frame.filename for frame in traceback.extract_tb(error.__traceback__))
