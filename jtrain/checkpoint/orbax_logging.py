"""Orbax logging: hides what Orbax and its event loops log after a failure that is raised anyway.

One failed write makes hundreds of lines: for each other write in progress asyncio logs that its
task or future was never retrieved, Python that a coroutine was never awaited, and TensorStore that
its event loop is closed.
"""

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

UNAWAITED = r"coroutine '\w*serialize\w*(\.<locals>\.\w+)?' was never awaited"
"""Pattern of the warnings for coroutines of Orbax that a failed write leaves behind."""
_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"  # part of the path of its files
_STORE = re.compile("[A-Z_]+: Error (opening|reading|writing) ")  # errors of TensorStore


def hide_failures() -> None:
    """Hide the logged and printed failures of Orbax from now on, and nothing else."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_foreign not in logger.filters:
            logger.addFilter(_is_foreign)
    warnings.filterwarnings("ignore", UNAWAITED, RuntimeWarning)  # repeats add nothing
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


@contextlib.contextmanager
def hide_task_errors() -> Iterator[None]:
    """Hide all messages of asyncio and Python about the tasks that a failed read leaves behind."""
    loop, hook = logging.getLogger("asyncio"), sys.unraisablehook
    disabled = loop.disabled
    loop.disabled, sys.unraisablehook = True, lambda _: None
    try:
        yield
    finally:
        loop.disabled, sys.unraisablehook = disabled, hook


class _UnraisableHook:
    """Hook for unraisable errors that drops those of Orbax and TensorStore after a write."""

    def __init__(self, previous: Callable[[Any], object]):
        self._previous = previous

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (_is_of_orbax(error) or (closed and unraisable.object is None)):
            self._previous(unraisable)


def _is_foreign(record: logging.LogRecord) -> bool:
    """Return whether neither a log record nor its error comes from Orbax."""
    error = record.exc_info[1] if record.exc_info else None
    return not (_is_of_orbax(error) or _ORBAX in record.pathname or _is_task_of_orbax(record))


def _is_task_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether asyncio logs a task of Orbax, recognized by its file."""
    with contextlib.suppress(TypeError, ValueError):  # wrong arguments, which logging reports
        return record.name == "asyncio" and _ORBAX in record.getMessage()
    return False


def _is_of_orbax(error: BaseException | None) -> bool:
    """Return whether an error went through Orbax, or TensorStore made it outside Python."""
    if error is None:
        return False
    if error.__traceback__ is None:
        return _STORE.match(str(error)) is not None
    trace = error.__traceback__  # a `traceback.extract_tb` reads files, which an exit may be past
    while trace is not None and _ORBAX not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace is not None
