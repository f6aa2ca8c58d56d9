"""Advice for what the system refuses: what to do about a file that could not be written."""

import errno
from pathlib import Path
from typing import NamedTuple


class DiskAdvice(NamedTuple):
    """What to do about an error of the system."""

    words: str
    """A sentence without its full stop."""
    room: bool = False
    """Whether room is lacking, which deletions would make."""


class _Cause(NamedTuple):
    """Errors with one remedy: their numbers, and how libraries that hide the number spell them."""

    numbers: set[int]
    spellings: tuple[str, ...]
    words: str
    room: bool = False


# Tried in this order: a library says RESOURCE_EXHAUSTED of several.
_CAUSES = (
    _Cause(
        {errno.EFBIG},
        ("File too large",),
        "Files may not grow so large here: raise the limit (ulimit -f)",
    ),
    _Cause(
        {errno.EDQUOT},
        ("quota exceeded",),
        "The quota is used up: make room, or ask for more",
        room=True,
    ),
    _Cause(
        {errno.EACCES, errno.EPERM},
        ("Permission denied", "Operation not permitted", "PERMISSION_DENIED"),
        "You may not write there: see whose it is (ls -ld {path}), make it yours to write "
        "(chmod u+rwx), or name another place",
    ),
    _Cause(
        {errno.EROFS},
        ("Read-only file system",),
        "The file system is mounted to be read only: name a place on another one",
    ),
    _Cause(
        {errno.ENOTDIR, errno.EEXIST},
        ("Not a directory", "File exists"),
        "A file lies where a folder is needed: move it away (see ls -l {path})",
    ),
    _Cause(
        {errno.EISDIR, errno.EINVAL, errno.ENXIO},
        ("Is a directory", "is a directory", "and was to be a file"),
        "Something else lies where a file is needed: move it away (see ls -l {path})",
    ),
    _Cause(
        {errno.ENOENT},
        ("No such file or directory", "NOT_FOUND"),
        "A folder was moved or removed: put it back",
    ),
    _Cause(
        {errno.EIO},
        ("Input/output error",),
        "The device fails: look at it (dmesg), or take another",
    ),
    _Cause({errno.EMFILE, errno.ENFILE}, ("Too many open files",), "Raise the limit (ulimit -n)"),
    _Cause(
        {errno.ENOSPC},
        ("No space left", "RESOURCE_EXHAUSTED"),
        "Make room or lower checkpoint.keep",
        room=True,
    ),
)


def disk_advice(error: BaseException, path: Path) -> DiskAdvice:
    """Return what to do about an error that the system, or a library for it, raised at `path`."""
    number, text = getattr(error, "errno", None), str(error)
    for cause in _CAUSES:
        if number in cause.numbers:
            return DiskAdvice(cause.words.format(path=path), cause.room)
    for cause in _CAUSES:
        if any(words in text for words in cause.spellings):
            return DiskAdvice(cause.words.format(path=path), cause.room)
    return DiskAdvice(f"Look at the place (ls -ld {path}; df -h {path}) and mend it")
