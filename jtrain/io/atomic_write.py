"""Files written as a whole, whose mode the umask decides."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jtrain.errors import ConfigError, UserError

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


def atomic_write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the content of `path` by one rename of a flushed file.

    Args:
        mode: of the file, before the umask takes its part; 0o600 for secrets.
    """
    temporary = path.with_name(path.name + NEW)
    with create_new(temporary, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # makes the rename durable
    finally:
        os.close(directory)
