"""Errors of the system: what to do about one, and which may pass when tried again.

An error that may pass (a share that is away, no open file or no memory left) says nothing about the
bytes of a file. What meets one is tried again, with growing waits; then it is an
`UnreachableError`, with the exit code after which a launcher starts again.
"""

import errno
import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from jtrain.errors import UnreachableError
from jtrain.io.regular_files import FACTS


class DiskAdvice(NamedTuple):
    """Advice for one system error."""

    words: str
    """A sentence without its full stop."""
    room: bool = False
    """True if the disk or the quota is full, so that deletions help."""


# Tried in this order: libraries report RESOURCE_EXHAUSTED for several causes.
_CAUSES: tuple[tuple[set[int], tuple[str, ...], str], ...] = (
    (
        {errno.EFBIG},
        ("File too large",),
        "Files may not grow so large here: raise the limit (ulimit -f)",
    ),
    (
        {errno.EDQUOT},
        ("quota exceeded",),
        "The quota is used up: make room, or request a larger quota",
    ),
    (
        {errno.EACCES, errno.EPERM},
        ("Permission denied", "Operation not permitted", "PERMISSION_DENIED"),
        "Write permission is missing: check the owner (ls -ld {path}), add the permission "
        "(chmod u+rwx), or choose another location",
    ),
    (
        {errno.EROFS},
        ("Read-only file system",),
        "The file system is mounted read-only: choose a location on another one",
    ),
    (
        {errno.ENOTDIR, errno.EEXIST},
        ("Not a directory", "File exists"),
        "A file is where a directory is needed: move the file away (see ls -l {path})",
    ),
    (
        {errno.EISDIR, errno.EINVAL, errno.ENXIO},
        ("Is a directory", "is a directory", "and should be a file"),
        "A file is needed and something else is in its place: move that away (see ls -l {path})",
    ),
    (
        {errno.ENOENT},
        ("No such file or directory", "NOT_FOUND"),
        "A directory was moved or removed: put the directory back",
    ),
    (
        {errno.EIO},
        ("Input/output error",),
        "The device fails: check its errors (dmesg), or use another device",
    ),
    ({errno.EMFILE, errno.ENFILE}, ("Too many open files",), "Raise the limit (ulimit -n)"),
    ({errno.ENOMEM}, ("Cannot allocate memory",), "Free some memory (free -h)"),
    (
        {errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN},
        ("Stale file handle", "timed out", "endpoint"),
        "The file system does not answer: wait for it, or mount it again (df {path})",
    ),
    (
        {errno.ENOSPC},
        ("No space left", "RESOURCE_EXHAUSTED"),
        "Make room or lower checkpoint.keep",
    ),
)
_FULL = {errno.EDQUOT, errno.ENOSPC}


def disk_advice(error: BaseException, path: Path | str) -> DiskAdvice:
    """Return advice for an error that the system or a library raised at `path`."""
    number, text = getattr(error, "errno", None), str(error)
    by_number = [cause for cause in _CAUSES if number in cause[0]]
    by_text = [cause for cause in _CAUSES if any(each in text for each in cause[1])]
    for numbers, _, words in by_number or by_text:
        return DiskAdvice(words.format(path=path), bool(numbers & _FULL))
    return DiskAdvice(f"Check the location (ls -ld {path}; df -h {path}) and fix it")


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
