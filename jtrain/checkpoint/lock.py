"""One writer a directory: who holds it, and how one that died gives it up.

The kernel holds the lock (flock) for as long as its process lives, however that ends; the file says
who holds it. On a file system that knows no locks nobody is refused.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any

from jtrain.checkpoint import folder
from jtrain.errors import CheckpointError

NAME = ".writer"
_PATIENCE = 0.5  # seconds for one who is just leaving
_UNKNOWN = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


class Lock:
    """The right to write in a directory, until it is let go."""

    def __init__(self, directory: Path):
        """Takes it.

        Raises:
            CheckpointError: if another holds it, with who that is, or the directory cannot be
                written.
        """
        self._path, end = directory / NAME, time.monotonic() + _PATIENCE
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
            while (file := self._try()) is None:
                if time.monotonic() > end:
                    raise _held(directory, holder(directory))
                time.sleep(0.02)
        except OSError as error:
            raise folder.unwritable(directory, error) from None
        self._file: int | None = file
        _locks.add(self)

    def release(self) -> None:
        """Lets it go; folders that were made for it go too where nothing came into them."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
                for path in self._made:
                    path.rmdir()
            self.forget()

    def _try(self) -> int | None:
        """The open file, locked and ours; None if another has it."""
        folder.make(self._path.parent)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(self._path, flags, 0o600)
        except FileNotFoundError:  # the folder went with another who lets go
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                os.close(file)
                if isinstance(error, BlockingIOError):
                    return None
                raise
        if not self._named(file):  # it was let go, and its name with it, while we opened it
            os.close(file)
            return None
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(_myself()).encode(), 0)
        return file

    def _named(self, file: int) -> bool:
        try:
            there, here = os.stat(self._path), os.fstat(file)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def forget(self) -> None:
        """Closes the file; in a child the lock stays with its parent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _forget() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_forget)  # a child that outlives us would keep it for us


def holder(directory: Path) -> dict[str, Any]:
    """Who says that they write there: host, pid, since (seconds of 1970); empty if nobody does."""
    try:
        return dict(json.loads((directory / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _myself() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}


def _held(directory: Path, who: dict[str, Any]) -> CheckpointError:
    here = who.get("host") == socket.gethostname()
    since = who.get("since", time.time())
    told = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    pid = who.get("pid", "unknown")
    stop = f"kill {pid}" if here else f"ssh {who.get('host', 'HOST')} kill {pid}"
    return CheckpointError(
        f"{directory} is to be written by one process, and process {pid} on "
        f"{who.get('host', 'an unknown host')} writes there since {told} "
        f"({max(0, time.time() - since):.0f} s). Wait for it, end it ({stop}), or start a run of "
        f"another name (name=...)."
    )
