"""Files that are one user's alone, and are nobody's link to another place."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jtrain.errors import ConfigError, UserError

UMASK = "JTRAIN_UMASK"
OTHERS = 0o077


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What is made within is of modes 0700 and 0600, whoever makes it; JTRAIN_UMASK says otherwise.

    JTRAIN_UMASK=027 lets the group read. What was there before keeps its mode. The mask is the
    process's own: other threads that make files meanwhile make theirs private as well.

    Raises:
        ConfigError: if JTRAIN_UMASK is no mask.
    """
    said = os.environ.get(UMASK, "")
    try:
        mask = int(said, 8) if said else OTHERS
        before = os.umask(mask) if 0 <= mask <= OTHERS else -1
    except ValueError:
        before = -1
    if before < 0:
        raise ConfigError(
            f"{UMASK}={said} is no mask: three octal digits, of which the first is 0, of what "
            f"others may not do. Set {UMASK}=027 to let the group read, or unset it."
        )
    try:
        yield
    finally:
        os.umask(before)


def create_private(path: Path) -> BinaryIO:
    """A new file, open to be written; one of that name is removed first, and a link not followed.

    Raises:
        OSError: if it cannot be made, or another makes it at the same moment.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def resolve_inside(folder: Path, name: object, error: type[UserError], said: Path) -> Path:
    """`folder / name`, of a name that a file says: a file of this folder, and no place elsewhere.

    Args:
        error: raised with what is wrong, for `said`.
        said: the file that says it.
    """
    plain = (
        isinstance(name, str) and name not in {"", ".", ".."} and not {*name} & {"/", "\\", "\0"}
    )
    if plain and (folder / str(name)).resolve().parent == folder.resolve():
        return folder / str(name)
    raise error(
        f"{said} names the file {name!r}, which is not one beside it: such a file may not be "
        f"read. Get {said} again from where it was made, with the files that it names."
    )


def check_no_links(directory: Path) -> None:
    """Makes sure that what lies in a run's directory lies in it, and not where a link leads.

    Raises:
        ConfigError: if an entry, or an entry of one of its folders, is a link out of it.
    """
    place = directory.resolve()
    for path in _entries(directory):
        if path.is_symlink() and not path.resolve().is_relative_to(place):
            raise ConfigError(
                f"{path} is a link to {path.readlink()}, out of the run's directory: what is "
                f"written there would land elsewhere. Remove the link (rm {path}); to keep runs "
                f"on another disk, link runs/ as a whole."
            )


def _entries(directory: Path) -> Iterator[Path]:
    """What lies in a directory and in its folders, one deep; nothing where there is none."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from path.iterdir()
