"""Errors of the system that may pass: a share that is away, no open file or no memory left.

Such an error says nothing about the bytes of a file. What meets one is tried again, with growing
waits; then it is an `UnreachableError`, with the exit code after which a launcher starts again.
"""

import errno
import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from jtrain.errors import UnreachableError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.regular_files import FACTS

T = TypeVar("T")
P = ParamSpec("P")

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between two attempts
sleep = time.sleep  # replaced in tests
_MAY_PASS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR),
    *(errno.EIO, errno.EBUSY, errno.ESTALE, errno.ENOLCK, errno.EPROTO, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
    *(getattr(errno, name, errno.EIO) for name in ("EREMOTEIO", "ECOMM", "ENOLINK", "ETIME")),
}
_IN_TEXT = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's errors


def may_pass(error: BaseException | None) -> bool:
    """Return whether an error, or one during whose handling it was raised, may pass."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _MAY_PASS:
            return True
        error = error.__context__
    return False


def system_error(error: Exception) -> OSError | None:
    """Return the error of the system that an error of TensorStore names; None if it names none."""
    if isinstance(error, OSError):
        return error
    found = _IN_TEXT.search(str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


def attempt(path: Path, action: Callable[[], T]) -> T:
    """Return the result of an action; try again, with growing waits, after an error that may pass.

    Raises:
        UnreachableError: for `path`, at the last error that may pass.
        OSError: any other one.
    """
    waits = iter(WAITS)
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise
            if (wait := next(waits, None)) is None:
                raise unreachable_error(path, error) from None
        sleep(wait)


def patiently(function: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """Decorate a function that reads a path, so that it raises `FACTS` or an UnreachableError."""

    @functools.wraps(function)
    def read(path: Path, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return attempt(path, lambda: function(path, *args, **kwargs))
        except FACTS:
            raise
        except OSError as error:
            raise unreachable_error(path, error) from None

    return read


def unreachable_error(path: Path, error: OSError) -> UnreachableError:
    """Return the error for a path that cannot be read now."""
    words = disk_advice(error, path).words
    if isinstance(error, PermissionError):
        words = f"Make it readable (chmod -R u+rwX {path})"
    return UnreachableError(
        f"{path} cannot be read now ({error.strerror or error}). Nothing was renamed or deleted. "
        f"{words}, and run again."
    )
