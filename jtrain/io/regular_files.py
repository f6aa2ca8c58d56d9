"""Opening and reading files that somebody else may have put there: no wait, and no more than fits.

A name in a run's directory, a checkpoint or a data set may be a named pipe, a device or a folder,
and JSON in a file may be nested without end. Opening a pipe waits for a writer for ever, reading a
device has no end, and Python's JSON parser gives up with a RecursionError. Here each of these is an
OSError or a ValueError, at once.

Or the name is a link to a file of the reader's that whoever made the directory may not see. With
`inside` no link below that directory is followed, whatever becomes of it meanwhile.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

JSON_DEPTH = 64  # levels; what jtrain writes has at most 10
JSON_BYTES = 1 << 28  # a tokenizer.json of 250,000 tokens has 2**25

Mode: TypeAlias = Literal["rb", "ab", "a+b", "wb", "r+b"]
_FLAGS: dict[str, int] = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "r+b": os.O_RDWR,
}
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a link"),
)


class TooLargeError(ValueError):
    """A file is longer, or JSON is nested deeper, than its reader takes."""


class LinkError(OSError):
    """A link lies where only what lies in the directory itself is read."""


def open_regular(
    path: Path, mode: Mode = "rb", *, buffering: int = -1, inside: Path | None = None
) -> BinaryIO:
    """Open a regular file; never wait for another process.

    Args:
        path: of the file.
        mode: as of the builtin `open`.
        buffering: likewise.
        inside: a directory above the file, below which no link is followed; None follows any.

    Raises:
        LinkError: if the file, or a folder between it and `inside`, is a link.
        OSError: if the file cannot be opened, or `path` is no regular file; `strerror` says what
            it is.
    """
    # Without O_NONBLOCK a named pipe is opened when somebody opens its other end.
    flags = _FLAGS[mode] | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    # A device that is opened may act on it (a tape rewinds), and a folder has no file to truncate.
    if inside is None:
        if os.path.exists(path):
            check_regular(path)
        descriptor = os.open(path, flags, 0o666)
    else:
        descriptor = _open_inside(path, inside, flags)
    try:
        _check(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, mode, buffering)
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Raise OSError if `path` is not there or is no regular file (a link to one is).

    For files that another library opens.
    """
    _check(os.stat(path).st_mode, path)


def read_bytes(path: Path, *, most: int, inside: Path | None = None) -> bytes:
    """Return the content of a regular file of at most `most` bytes; `inside` as `open_regular`.

    Raises:
        OSError: as `open_regular`.
        TooMuchError: if the file is longer.
    """
    with open_regular(path, inside=inside) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if size > most or len(content) > most:
        raise TooLargeError(f"is longer than {most:,} bytes")
    return content


def read_json(
    path: Path, *, most: int = JSON_BYTES, depth: int = JSON_DEPTH, inside: Path | None = None
) -> Any:
    """Return the JSON in a regular file, UTF-8; `inside` as `open_regular`.

    Raises:
        OSError: as `open_regular`.
        ValueError: if the content is not JSON, longer than `most` bytes, or deeper than `depth`.
    """
    return parse_json(read_bytes(path, most=most, inside=inside), depth=depth)


def parse_json(text: str | bytes, *, depth: int = JSON_DEPTH) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if the text is not JSON, or nested deeper than `depth` levels.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise TooLargeError(f"is nested deeper than {depth} levels") from None
    level = _containers([value])
    for _ in range(depth):
        if not level:
            return value
        level = [inner for each in level for inner in _containers(each)]
    if level:
        raise TooLargeError(f"is nested deeper than {depth} levels")
    return value


def kind_of(mode: int) -> str:
    """Return what a file of this `st_mode` is, `a named pipe` say; empty for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "no file")


def check_no_link(path: Path) -> None:
    """Raise LinkError if `path` itself is a link; a file that is not there is none."""
    if os.path.islink(path):
        raise _link_error(path)


def _open_inside(path: Path, inside: Path, flags: int) -> int:
    """Open a file below a directory, folder by folder, and follow no link.

    Each folder is held open while the next is looked up in it, so that nobody can put a link in
    its place between a look and the opening.
    """
    *folders, name = path.relative_to(inside).parts
    enter = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
    place, here = os.open(inside, enter), inside
    try:
        for folder in folders:
            here = here / folder
            _check_entry(folder, place, here, file=False)
            place, above = os.open(folder, enter | os.O_NOFOLLOW, dir_fd=place), place
            os.close(above)
        _check_entry(name, place, path, file=True)
        return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=place)
    except OSError as error:
        error.filename = f"{path}"
        raise
    finally:
        os.close(place)


def _check_entry(name: str, place: int, path: Path, *, file: bool) -> None:
    try:
        mode = os.stat(name, dir_fd=place, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return  # for opening to say, or to make
    if stat.S_ISLNK(mode):
        raise _link_error(path)
    if file:
        _check(mode, path)


def _link_error(path: Path) -> LinkError:
    where = os.fsdecode(os.readlink(path))
    return LinkError(errno.ELOOP, f"is a link to {where}, which is not followed", f"{path}")


def _check(mode: int, path: Path) -> None:
    kind = kind_of(mode)
    if kind == "a directory":
        raise IsADirectoryError(errno.EISDIR, "is a directory, and was to be a file", f"{path}")
    if kind:
        raise OSError(errno.EINVAL, f"is {kind}, and was to be a file", f"{path}")


def _containers(value: Any) -> list[Any]:
    """The dicts and lists in a dict or a list."""
    values = value.values() if isinstance(value, dict) else value
    return [each for each in values if isinstance(each, dict | list)]
