"""Lost files: what other processes removed or replaced while a run wrote in its directory."""

import collections
import os
import weakref
from collections.abc import Callable
from pathlib import Path


class MessageBacklog:
    """Queue of log lines, filled on any thread and sent in order once a log is set."""

    def __init__(self):
        self._waiting: collections.deque[str] = collections.deque()
        self._log: Callable[[str], object] | None = None

    def __call__(self, line: str) -> None:
        """Log a line, or queue it until `send_to` sets the log."""
        self._waiting.append(line)
        self._send_all()

    def send_to(self, log: Callable[[str], object]) -> None:
        """Send all lines to `log` from now on, the queued ones first."""
        self._log = log
        self._send_all()

    def _send_all(self) -> None:
        while self._log is not None:
            try:
                line = self._waiting.popleft()
            except IndexError:  # also where another thread has taken the last one
                return
            self._log(line)


class LostFiles:
    """Record of lost files: each loss is reported once, and fails the run at its end.

    A run whose files were removed or truncated still takes all its steps, and fails at its end. The
    same command then accepts the files as they are.
    """

    def __init__(self):
        self.found: list[str] = []
        """Losses, which fail the run."""
        self._messages = MessageBacklog()

    def __call__(self, line: str) -> None:
        """Record and report a loss; on any thread."""
        if line not in self.found:
            self.found.append(line)
            self._messages(f"LOST: {line}")

    def send_to(self, log: Callable[[str], object]) -> None:
        """Send each line to `log`, earlier ones included."""
        self._messages.send_to(log)

    @property
    def why(self) -> str:
        """Reason why the run fails; empty if nothing was lost."""
        if not self.found:
            return ""
        return (
            f"other processes removed or changed files of the run: {'; '.join(self.found)}. All "
            f"steps were taken; the same command succeeds from now on"
        )


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
