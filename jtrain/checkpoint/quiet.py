"""Keeps what Orbax and its event loops complain of off the screen: all that fails is raised.

One write that fails makes hundreds of lines: of each other write that was under way asyncio says
that its task was never asked, and TensorStore that its event loop is closed.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any


def silence() -> None:
    """Drops from now on what is logged and printed of Orbax's failures, and nothing else."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _of_others not in logger.filters:
            logger.addFilter(_of_others)
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
    """Passes on what Python cannot raise, but for what TensorStore could not tell a closed loop."""

    def __init__(self, before: Callable[[Any], object]):
        self._before = before

    def __call__(self, told: Any) -> None:
        closed = told.exc_type is RuntimeError and str(told.exc_value) == "Event loop is closed"
        if not (closed and told.object is None):
            self._before(told)


def _of_others(record: logging.LogRecord) -> bool:
    """Whether neither the line nor the error that it tells of comes from Orbax."""
    error = record.exc_info[1] if record.exc_info else None
    files = [frame.filename for frame in traceback.extract_tb(error and error.__traceback__)]
    return not any(f"{os.sep}orbax{os.sep}" in file for file in (record.pathname, *files))
