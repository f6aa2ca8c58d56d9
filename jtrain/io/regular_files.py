"""Safe reading of files that others may have written: no waiting, bounded size, no links.

A name in a run's directory, a checkpoint or a data set may be a named pipe, a device or a folder,
and JSON in a file may be nested without end. Opening a pipe waits for a writer for ever, reading a
device has no end, and Python's JSON parser fails with a RecursionError. Here each of these is an
OSError or a ValueError, at once.

A name may also be a link to a private file of the reader. With `inside`, no link below that
directory is followed.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from jtrain.errors import ConfigError, UserError

JSON_DEPTH = 64  # levels; jtrain writes at most 10
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
    """A file longer, or JSON nested deeper, than its reader accepts."""


class LinkError(OSError):
    """A link where only files of the directory itself are read."""


class KindError(OSError):
    """A pipe, a socket or a device in the place of a file."""


# What is in the place of a file. Any other error of the system is about the way to it.
FACTS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, LinkError, KindError)


def open_regular(
    path: Path, mode: Mode = "rb", *, buffering: int = -1, inside: Path | None = None
) -> BinaryIO:
    """Open a regular file; never wait for another process.

    Args:
        mode, buffering: as in the builtin `open`.
        inside: a directory above the file, below which no link is followed; None follows any.

    Raises:
        LinkError: if the file, or a folder between it and `inside`, is a link.
        OSError: if the file cannot be opened, or `path` is not a regular file; `strerror` has its
            kind.
    """
    # Without O_NONBLOCK, opening a named pipe waits until somebody opens its other end.
    flags = _FLAGS[mode] | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if inside is not None:
        below = inside
        for name in path.relative_to(inside).parts:
            below = below / name
            check_no_link(below)
    # Opening a device may act on it (a tape rewinds), and a folder has no file to truncate.
    if os.path.exists(path):
        check_regular(path)
    descriptor = os.open(path, flags, 0o666)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, mode, buffering)
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Raise OSError unless `path` is a regular file or a link to one.

    For files that another library opens.
    """
    _check_mode(os.stat(path).st_mode, path)


def read_bytes(path: Path, *, most: int, inside: Path | None = None) -> bytes:
    """Return the content of a regular file of at most `most` bytes; `inside` as `open_regular`.

    Raises:
        OSError: as `open_regular`.
        TooLargeError: if the file is longer.
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
        level = [inner for container in level for inner in _containers(container)]
    if level:
        raise TooLargeError(f"is nested deeper than {depth} levels")
    return value


def file_kind(mode: int) -> str:
    """Return the kind of a file by its `st_mode`, `a named pipe` say; empty for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "no file")


def check_no_link(path: Path) -> None:
    """Raise LinkError if `path` itself is a link; a missing file is none."""
    if os.path.islink(path):
        where = os.fsdecode(os.readlink(path))
        raise LinkError(errno.ELOOP, f"is a link to {where}, which is not followed", f"{path}")


def _check_mode(mode: int, path: Path) -> None:
    kind = file_kind(mode)
    if kind == "a directory":
        raise IsADirectoryError(errno.EISDIR, "is a directory, and should be a file", f"{path}")
    if kind:
        raise KindError(errno.EINVAL, f"is {kind}, and should be a file", f"{path}")


def _containers(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value
    return [inner for inner in values if isinstance(inner, dict | list)]


NEW = ".new"
"""End of the name that a file has until it is complete and replaces the one of its name."""


def create_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a new file for writing; remove a file of that name first, follow no link.

    Raises:
        OSError: if the file cannot be created, or another process creates it at the same moment.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, mode), "wb")


def resolve_inside(folder: Path, name: object, error: type[UserError], source: Path) -> Path:
    """Return `folder / name` if `name`, which a file gives, is a plain file of this folder.

    Args:
        error: raised otherwise.
        source: the file that gives the name. If it is a link, as in the Hub's cache, the named file
            may be one into the same folder.
    """
    is_plain = (
        isinstance(name, str)
        and name not in {"", ".", ".."}
        and not {*name} & {"/", "\\", "\0"}
        and name.encode(errors="replace").decode() == name  # no half of a surrogate pair
    )
    real = {folder.resolve(), source.resolve().parent}
    if is_plain and (folder / str(name)).resolve().parent in real:
        return folder / str(name)
    raise error(
        f"{source} names the file {name!r}, which is not in the same folder: such a file may not "
        f"be read. Get {source} again from its source, with the files that it names."
    )


def check_no_links(directory: Path) -> None:
    """Raise unless the entries of the directory of a run stay inside it.

    Raises:
        ConfigError: if an entry, or an entry of one of its folders, is a link out of the directory.
    """
    root = directory.resolve()
    for path in _entries_of(directory):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise ConfigError(
                f"{path} is a link to {path.readlink()}, out of the run's directory: files "
                f"written to it would land elsewhere. Remove the link (rm {path}); to keep runs "
                f"on another disk, link all of runs/."
            )


def _entries_of(directory: Path) -> Iterator[Path]:
    """Yield the entries of a directory and of its folders, one level deep."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from path.iterdir()


def atomic_write(
    path: Path, content: bytes | Iterable[bytes | memoryview], mode: int = 0o666
) -> None:
    """Replace the content of `path` by one rename of a flushed file; durably, or not at all.

    Args:
        content: all of it, or its parts in order.
        mode: of the file, before the umask takes its part; 0o600 for secrets.
    """
    temporary = path.with_name(path.name + NEW)
    try:
        with create_new(temporary, mode) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # makes the rename durable
    finally:
        os.close(directory)
