"""Advice for system errors: how to fix a file that cannot be written."""

import errno
from pathlib import Path
from typing import NamedTuple


class DiskAdvice(NamedTuple):
    """Advice for one system error."""

    words: str
    """A sentence without its full stop."""
    room: bool = False
    """True if the disk or the quota is full, so that deletions help."""


class _Cause(NamedTuple):
    """System errors with one remedy: their numbers, and their spellings in libraries."""

    numbers: set[int]
    spellings: tuple[str, ...]
    words: str
    room: bool = False


# Tried in this order: libraries report RESOURCE_EXHAUSTED for several causes.
_CAUSES = (
    _Cause(
        {errno.EFBIG},
        ("File too large",),
        "Files may not grow so large here: raise the limit (ulimit -f)",
    ),
    _Cause(
        {errno.EDQUOT},
        ("quota exceeded",),
        "The quota is used up: make room, or request a larger quota",
        room=True,
    ),
    _Cause(
        {errno.EACCES, errno.EPERM},
        ("Permission denied", "Operation not permitted", "PERMISSION_DENIED"),
        "Write permission is missing: check the owner (ls -ld {path}), add the permission "
        "(chmod u+rwx), or choose another location",
    ),
    _Cause(
        {errno.EROFS},
        ("Read-only file system",),
        "The file system is mounted read-only: choose a location on another one",
    ),
    _Cause(
        {errno.ENOTDIR, errno.EEXIST},
        ("Not a directory", "File exists"),
        "A file is where a directory is needed: move the file away (see ls -l {path})",
    ),
    _Cause(
        {errno.EISDIR, errno.EINVAL, errno.ENXIO},
        ("Is a directory", "is a directory", "and should be a file"),
        "A file is needed and something else is in its place: move that away (see ls -l {path})",
    ),
    _Cause(
        {errno.ENOENT},
        ("No such file or directory", "NOT_FOUND"),
        "A directory was moved or removed: put the directory back",
    ),
    _Cause(
        {errno.EIO},
        ("Input/output error",),
        "The device fails: check its errors (dmesg), or use another device",
    ),
    _Cause({errno.EMFILE, errno.ENFILE}, ("Too many open files",), "Raise the limit (ulimit -n)"),
    _Cause({errno.ENOMEM}, ("Cannot allocate memory",), "Free some memory (free -h)"),
    _Cause(
        {errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN},
        ("Stale file handle", "timed out", "endpoint"),
        "The file system does not answer: wait for it, or mount it again (df {path})",
    ),
    _Cause(
        {errno.ENOSPC},
        ("No space left", "RESOURCE_EXHAUSTED"),
        "Make room or lower checkpoint.keep",
        room=True,
    ),
)


def disk_advice(error: BaseException, path: Path | str) -> DiskAdvice:
    """Return advice for an error that the system or a library raised at `path`."""
    number, text = getattr(error, "errno", None), str(error)
    for cause in _CAUSES:
        if number in cause.numbers:
            return DiskAdvice(cause.words.format(path=path), cause.room)
    for cause in _CAUSES:
        if any(words in text for words in cause.spellings):
            return DiskAdvice(cause.words.format(path=path), cause.room)
    return DiskAdvice(f"Check the location (ls -ld {path}; df -h {path}) and fix it")
