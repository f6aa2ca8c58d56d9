"""One writer a directory: who holds it, and how one that died gives it up.

The kernel holds the lock (flock) for as long as its process lives, however that ends. It is on the
directory itself, so that nobody who removes a file of it lets a second writer in, and on the file
that says who holds it, for file systems that lock files alone (NFS). On one that knows no locks
nobody is refused.
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
from jtrain.io.regular_files import read_json
from jtrain.io.same_file import HeldFolder, file_identity

NAME = ".writer"
_PATIENCE = 0.5  # seconds for one who is just leaving
_MOST = 1 << 16  # bytes that say who holds it
# EBADF: NFS locks a file only where it is open to be written, as no directory can be.
_UNKNOWN = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


class Lock:
    """The right to write in a directory, until it is let go or nothing refers to it.

    A Ctrl-C may come between any two steps of this: what was open is closed then, for the same
    notebook would be refused ever after by a lock that it cannot let go.
    """

    _file: io.FileIO | None = None
    _folder: HeldFolder | None = None
    _above: HeldFolder | None = None

    def __init__(self, directory: Path):
        """Takes it.

        Raises:
            CheckpointError: if another holds it, with who that is, or the directory cannot be
                written.
        """
        self._path = directory / NAME
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        _locks.add(self)
        try:
            self._take()
        except BaseException:  # a Ctrl-C when it has been taken
            self.forget()
            raise

    def __del__(self):
        self.forget()

    @property
    def is_above_there(self) -> bool:
        """Whether the folder above the directory is the one that it was."""
        return self._above is None or self._above.is_there

    def renew(self) -> str:
        """Make sure that the directory is held, whatever others have removed since.

        Returns:
            What was missing, and is there again; empty if nothing was.

        Raises:
            CheckpointError: if another process writes there by now.
            FileNotFoundError: if the folder above was moved or removed too.
        """
        directory = self._path.parent
        if not self.is_above_there:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{directory}")
        same = self._folder is not None and self._folder.is_there
        if same and self._file is not None and _is_named(self._path, self._file):
            return ""
        self._take()
        if same:
            return f"{self._path} was removed while this process wrote there"
        return f"{directory} was moved or removed, and the checkpoints in it"

    def _take(self) -> None:
        directory, end = self._path.parent, time.monotonic() + _PATIENCE
        self._let_go()
        try:
            while not self._try():
                if time.monotonic() > end:
                    raise _held(directory, holder(directory))
                time.sleep(0.02)
        except BaseException as error:
            self._let_go()
            if isinstance(error, OSError):
                raise _unwritable(self._path, error) from None
            raise

    def release(self) -> None:
        """Lets it go; folders that were made for it go too where nothing came into them."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
                for path in self._made:
                    path.rmdir()
            self.forget()

    def forget(self) -> None:
        """Closes what is open; in a child the lock stays with its parent."""
        self._let_go()
        # Forgotten before it is closed: a Ctrl-C between the two would leave a closed one, which
        # looks like a folder that was moved, and the next save would refuse to write there.
        above, self._above = self._above, None
        if above is not None:
            above.close()

    def _let_go(self) -> None:
        try:
            self._close()
        except BaseException:  # a Ctrl-C between the two
            self._close()
            raise

    def _close(self) -> None:
        for each in (self._file, self._folder):
            if each is not None:
                each.close()
        self._file = self._folder = None

    def _try(self) -> bool:
        """Whether directory and file are open, locked and ours; False if another has one."""
        layout.make_directory(self._path.parent)
        try:
            self._folder = HeldFolder(self._path.parent)
            self._above = self._above or HeldFolder(self._path.parent.parent)
            self._file = io.FileIO(str(self._path), "r+", opener=_open)
        except FileNotFoundError:  # the folder went with another who lets go
            return False
        # Each under its name yet: who let it go removed that, while we opened it.
        ours = _locked(self._folder.fileno()) and self._folder.is_there
        ours = ours and _locked(self._file.fileno()) and _is_named(self._path, self._file)
        if ours:
            self._file.truncate(0)
            self._file.write(json.dumps(_myself()).encode())
        else:
            self._let_go()
        return ours


def _is_named(path: Path, file: io.FileIO) -> bool:
    return file_identity(path) == file_identity(file.fileno())


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _locked(file: int) -> bool:
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
    who = who or _known_to_the_kernel(directory)
    name = f"process {who['pid']} on {who['host']}" if who else "another"
    told = ""
    if since := who.get("since"):
        told = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
        told += f" ({max(0, time.time() - since):.0f} s)"
    return CheckpointError(
        f"{directory} is to be written by one process, and {name} writes there{told}. "
        f"{_way_out(who)}, or start a run of another name (name=...)."
    )


def _known_to_the_kernel(directory: Path) -> dict[str, Any]:
    """Who holds the lock of a directory whose file was removed; empty where Linux does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inode = str(directory.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, process, place, _, _ = line.split()
            if kind == "FLOCK" and place.rpartition(":")[2] == inode and int(process) > 0:
                return {"host": socket.gethostname(), "pid": int(process)}
    return {}


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    other = path.is_symlink() or (path.exists() and not path.is_file())
    if other and error.filename == str(path):
        return CheckpointError(
            f"{path} is to say who writes there, and is no file ({error.strerror}). Remove it: "
            f"rm -r {path}"
        )
    return layout.unwritable_error(path.parent, error)


def _way_out(who: dict[str, Any]) -> str:
    if not who:
        return "Wait for it, or end it"
    here = who["host"] == socket.gethostname()
    if here and who["pid"] == os.getpid():
        return "That is this process itself: close the Checkpoints that it has open there"
    where = "" if here else f"ssh {who['host']} "
    return f"Wait for it, end it ({where}kill {who['pid']})"
