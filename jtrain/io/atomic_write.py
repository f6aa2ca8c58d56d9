"""Files written as a whole, which only their owner can read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jtrain.errors import ConfigError, UserError

NEW = ".new"
"""End of the name that a file has until it is complete and replaces the one of its name."""
UMASK = "JTRAIN_UMASK"
OTHERS = 0o077


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Create files with mode 0600 and directories with 0700 inside the context.

    JTRAIN_UMASK overrides the mask: JTRAIN_UMASK=027 lets the group read. Existing files keep their
    mode. The mask is of the process: files that other threads create meanwhile are private too.

    Raises:
        ConfigError: if JTRAIN_UMASK is no mask.
    """
    text = os.environ.get(UMASK, "")
    try:
        mask = int(text, 8) if text else OTHERS
        previous = os.umask(mask) if 0 <= mask <= OTHERS else -1
    except ValueError:
        previous = -1
    if previous < 0:
        raise ConfigError(
            f"{UMASK}={text} is no mask: a mask has three octal digits, the first of them 0, for "
            f"the denied permissions. Set {UMASK}=027 to let the group read, or unset it."
        )
    try:
        yield
    finally:
        os.umask(previous)


def create_private(path: Path) -> BinaryIO:
    """Create a new file for writing; remove a file of that name first, follow no link.

    Raises:
        OSError: if the file cannot be created, or another process creates it at the same moment.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def resolve_inside(folder: Path, name: object, error: type[UserError], source: Path) -> Path:
    """Return `folder / name` if `name`, which a file gives, is a plain file of this folder.

    Args:
        error: raised otherwise.
        source: the file that gives the name.
    """
    is_plain = (
        isinstance(name, str)
        and name not in {"", ".", ".."}
        and not {*name} & {"/", "\\", "\0"}
        and name.encode(errors="replace").decode() == name  # no half of a surrogate pair
    )
    if is_plain and (folder / str(name)).resolve().parent == folder.resolve():
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
    for path in _entries(directory):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise ConfigError(
                f"{path} is a link to {path.readlink()}, out of the run's directory: files "
                f"written to it would land elsewhere. Remove the link (rm {path}); to keep runs "
                f"on another disk, link all of runs/."
            )


def _entries(directory: Path) -> Iterator[Path]:
    """Yield the entries of a directory and of its folders, one level deep."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from path.iterdir()


def atomic_write(path: Path, content: bytes) -> None:
    """Replace the content of `path` by one rename of a flushed file."""
    temporary = path.with_name(path.name + NEW)
    with create_private(temporary) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # makes the rename durable
    finally:
        os.close(directory)
