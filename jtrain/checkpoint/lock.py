"""Write lock: one writer for each directory of checkpoints, released when its process dies.

The kernel holds the lock (flock) as long as the process lives, however the process ends. It is on
the file that names the writer. A file system of several machines may grant the lock on each of
them: there the process that comes last is the writer, and one before it ends at its next save.
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

from jtrain.checkpoint import layout
from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import attempt
from jtrain.io.regular_files import read_json

NAME = ".writer"
_PATIENCE = 0.5  # seconds, for a writer that is just closing
_MOST = 1 << 16  # bytes of the record of the writer
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


class WriteLock:
    """Write lock of a directory, held until `release` or until nothing refers to it."""

    _file: io.FileIO | None = None
    _record: dict[str, Any] | None = None

    def __init__(self, directory: Path):
        """Acquire the lock.

        Raises:
            CheckpointError: if another process holds the lock, with its name, or the directory
                cannot be written; an UnreachableError if it may be writable again soon.
        """
        self._path = directory / NAME
        self._created = [
            path for path in (directory, *directory.parents) if not os.path.exists(path)
        ]
        _locks.add(self)
        try:
            self._take()
        except BaseException:  # a Ctrl-C after the lock was acquired
            self.forget()
            raise

    def __del__(self):
        self.forget()

    @property
    def is_in_place(self) -> bool:
        """True while the file in the directory is the one that was locked."""
        return self._file is not None and _is_named(self._path, self._file)

    def renew(self) -> None:
        """Check the lock before a save, and take it again if the directory was removed.

        Raises:
            CheckpointError: if another process now writes to the directory.
            FileNotFoundError: if the parent of the directory was moved or removed too.
        """
        if self.is_in_place:
            return self.check()
        directory = self._path.parent
        if not directory.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{directory}")
        self._take()

    def check(self) -> None:
        """Raise CheckpointError if a process of another machine has taken the directory."""
        record = read_holder(self._path.parent)
        if self._record and record and record["host"] != self._record["host"]:
            raise _held_error(self._path.parent, record)

    def release(self) -> None:
        """Release the lock, and remove folders that were created for it and are still empty."""
        if self._file is not None:
            with contextlib.suppress(OSError, CheckpointError):
                self.check()  # the file of another process stays
                self._path.unlink()
                for path in self._created:
                    path.rmdir()
            self.forget()

    def forget(self) -> None:
        """Close the file; in a forked child the lock stays with the parent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self) -> None:
        directory, end = self._path.parent, time.monotonic() + _PATIENCE
        self.forget()
        try:
            while not attempt(self._path, self._try):
                if time.monotonic() > end:
                    raise _held_error(directory, read_holder(directory))
                time.sleep(0.02)
        except BaseException as error:
            self.forget()
            if isinstance(error, OSError):
                raise _unwritable_error(self._path, error) from None
            raise

    def _try(self) -> bool:
        """Return whether the file is open and locked by this process."""
        layout.make_directory(self._path.parent)
        try:
            self._file = io.FileIO(str(self._path), "r+", opener=_open)
        except FileNotFoundError:  # another process has just removed the folder
            return False
        # It must still have its name: a releasing process may have removed it meanwhile.
        if _try_flock(self._file.fileno()) and _is_named(self._path, self._file):
            here = {"host": socket.gethostname(), "pid": os.getpid()}
            self._record = {**here, "since": time.time()}
            self._file.truncate(0)
            self._file.write(json.dumps(self._record).encode())
            return True
        self.forget()
        return False


def _is_named(path: Path, file: io.FileIO) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def _try_flock(file: int) -> bool:
    """Return whether the kernel grants the lock, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


_locks: "weakref.WeakSet[WriteLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(
    after_in_child=_forget_all
)  # a child that outlives the parent would hold the lock


def read_holder(directory: Path) -> dict[str, Any]:
    """Return the writer by its own record: host, pid, since (seconds of 1970); empty if none."""
    try:
        record = read_json(directory / NAME, most=_MOST, inside=directory)
        return {
            "host": str(record["host"]),
            "pid": int(record["pid"]),
            "since": float(record["since"]),
        }
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return {}


def _held_error(directory: Path, who: dict[str, Any]) -> CheckpointError:
    name, stop = "another process writes there", "stop it"
    if who:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(who["since"]))
        name = f"process {who['pid']} on {who['host']} writes there since {since}"
        is_local = who["host"] == socket.gethostname()
        stop = f"stop it ({'' if is_local else 'ssh {host} '.format(**who)}kill {who['pid']})"
        if is_local and who["pid"] == os.getpid():
            stop = "which is this process itself: close its CheckpointManager"
    return CheckpointError(
        f"{directory} can have one writer, and {name}. Wait for it, {stop}, or start a run of "
        f"another name (name=...). To train one model together, processes are started by a "
        f"launcher, such as jtrain launch; `jtrain show CONFIG --cluster` prints what one finds."
    )


def _unwritable_error(path: Path, error: OSError) -> CheckpointError:
    other = os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path))
    if other and error.filename == str(path):
        return CheckpointError(
            f"{path} should name the writer, and is not a file ({error.strerror}). Remove it: "
            f"rm -r {path}"
        )
    return layout.unwritable_error(path.parent, error)
