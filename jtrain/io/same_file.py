"""File identity: does a path still name the same file or folder?"""

import os
import weakref
from pathlib import Path


def file_identity(path: Path | int) -> tuple[int, int] | None:
    """Return the device and inode of a path or an open file; None if it does not exist.

    A link has an identity of its own. Equal identities mean one file only while the file is held
    open: the inode of a deleted file may be reused.
    """
    try:
        stat = os.fstat(path) if isinstance(path, int) else os.lstat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


class OpenFolder:
    """Folder held open, to detect that its path was moved, replaced or removed."""

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._close = weakref.finalize(self, os.close, self._file)

    @property
    def is_in_place(self) -> bool:
        """True while the path still names this folder."""
        return self._close.alive and file_identity(self.path) == file_identity(self._file)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file

    def close(self) -> None:
        """Close the descriptor; repeated calls do nothing."""
        self._close()
