"""Whether a path still names the file or folder that it named before."""

import os
import weakref
from pathlib import Path


def file_identity(path: Path | int) -> tuple[int, int] | None:
    """Return the device and the inode of what lies at a path or is open; None if nothing does.

    Of a link, its own. Two that are the same are one file, where one of them is held open: the
    inode of a file that is gone may be given to the next.
    """
    try:
        found = os.fstat(path) if isinstance(path, int) else os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class HeldFolder:
    """A folder that is there, held open; it knows when it was moved, replaced or removed."""

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._close = weakref.finalize(self, os.close, self._file)

    @property
    def is_there(self) -> bool:
        """Whether its path still names it."""
        return self._close.alive and file_identity(self.path) == file_identity(self._file)

    def fileno(self) -> int:
        """Return its open file."""
        return self._file

    def close(self) -> None:
        """Let it go; once is enough."""
        self._close()
