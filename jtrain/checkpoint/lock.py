"""One writer a directory: who holds it, and how one that died gives it up.

The kernel holds the lock (flock) for as long as its process lives, however that ends; the file says
who holds it. On a file system that knows no locks nobody is refused.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any

from jtrain.checkpoint import folder
from jtrain.errors import CheckpointError
from jtrain.regular_files import read_json

NAME = ".writer"
_PATIENCE = 0.5  # seconds for one who is just leaving
_MOST = 1 << 16  # bytes that say who holds it
_UNKNOWN = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


class Lock:
    """The right to write in a directory, until it is let go or nothing refers to it.

    A Ctrl-C may come between any two steps of this: what was open is closed then, for the same
    notebook would be refused ever after by a lock that it cannot let go.
    """

    _file: io.FileIO | None = None

    def __init__(self, directory: Path):
        """Takes it.

        Raises:
            CheckpointError: if another holds it, with who that is, or the directory cannot be
                written.
        """
        self._path, end = directory / NAME, time.monotonic() + _PATIENCE
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        _locks.add(self)
        try:
            while not self._try():
                if time.monotonic() > end:
                    raise _held(directory, holder(directory))
                time.sleep(0.02)
        except BaseException as error:
            self.forget()
            if isinstance(error, OSError):
                raise folder.unwritable(directory, error) from None
            raise

    def __del__(self):
        self.forget()

    def release(self) -> None:
        """Lets it go; folders that were made for it go too where nothing came into them."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
                for path in self._made:
                    path.rmdir()
            self.forget()

    def forget(self) -> None:
        """Closes the file; in a child the lock stays with its parent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _try(self) -> bool:
        """Whether the file is open, locked and ours; False if another has it."""
        folder.make(self._path.parent)
        try:
            self._file = io.FileIO(str(self._path), "r+", opener=_open)
        except FileNotFoundError:  # the folder went with another who lets go
            return False
        ours = _take(self._file) and self._is_named(self._file)
        if ours:
            self._file.truncate(0)
            self._file.write(json.dumps(_myself()).encode())
        else:
            self.forget()
        return ours

    def _is_named(self, file: io.FileIO) -> bool:
        """False if it was let go, and its name with it, while we opened it."""
        try:
            there, here = os.stat(self._path), os.fstat(file.fileno())
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _take(file: io.FileIO) -> bool:
    """Whether the kernel lets us have it, or knows no locks there."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    return True


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _forget() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_forget)  # a child that outlives us would keep it for us


def holder(directory: Path) -> dict[str, Any]:
    """Who says that they write there: host, pid, since (seconds of 1970); empty if nobody does."""
    try:
        said = read_json(directory / NAME, most=_MOST, inside=directory)
        return {
            "host": str(said["host"]),
            "pid": int(said["pid"]),
            "since": float(said["since"]),
        }
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return {}


def _myself() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}


def _held(directory: Path, who: dict[str, Any]) -> CheckpointError:
    since = who.get("since", time.time())
    told = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    name = f"process {who['pid']} on {who['host']}" if who else "another"
    return CheckpointError(
        f"{directory} is to be written by one process, and {name} writes there since {told} "
        f"({max(0, time.time() - since):.0f} s). {_way_out(who)}, or start a run of another name "
        f"(name=...)."
    )


def _way_out(who: dict[str, Any]) -> str:
    if not who:
        return "Wait for it, or end it"
    here = who["host"] == socket.gethostname()
    if here and who["pid"] == os.getpid():
        return "That is this process itself: close the Checkpoints that it has open there"
    where = "" if here else f"ssh {who['host']} "
    return f"Wait for it, end it ({where}kill {who['pid']})"
