"""Signs of life of a writer, for disks of several machines that do not share their locks.

A lock of the kernel (flock) holds among all processes of one machine. Whether it holds among the
machines of a network file system depends on its kind and on how it is mounted, and the answer is
the same either way: granted. So the writer counts up a number in its record there, and another
machine that finds the record watches the number before it takes the place of the writer.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.io.regular_files import open_regular

BEAT = 2.0  # seconds between two counts
WATCH = 7.0  # seconds without a count after which a writer is gone
LENGTH = 256  # bytes of a record, so that each count replaces the whole of it
# Kinds of file systems that one kernel alone writes, so that its locks are enough.
LOCAL = {
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs"),
    "overlay",
}


def is_shared(directory: Path) -> bool:
    """Return whether other machines may write to the file system of a directory."""
    return _kind(directory) not in LOCAL


def _kind(directory: Path) -> str:
    """Return the kind of a directory's file system, as in /proc/self/mountinfo; "" if unknown."""
    try:
        device = directory.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    rows = (line.split() for line in lines)
    # proc(5): the third field is the device, the one after the hyphen the kind.
    kinds = (row[row.index("-") + 1] for row in rows if row[2] == number and "-" in row)
    return next(kinds, "")


def encode(record: Mapping[str, Any]) -> bytes:
    """Return the record as a file has it: JSON of one length, whatever its numbers."""
    return json.dumps(record).encode().ljust(LENGTH - 1) + b"\n"


class WriterBeat:
    """Thread that counts in the record of this process until it is stopped or another's is there.

    It opens the file anew for each count: a descriptor of its own would hold the lock.
    """

    def __init__(self, path: Path, record: Mapping[str, Any]):
        """Begin to count in the record at `path`, which has been written."""
        self._path, self._record, self._pid = path, dict(record), os.getpid()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jtrain writer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; in a forked child, which has none, do nothing."""
        self._end.set()
        if self._pid == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1)

    def _run(self) -> None:
        count = 0
        while not self._end.wait(BEAT):
            count += 1
            try:
                with open_regular(self._path, "r+b") as file:
                    if not is_same_writer(json.loads(file.read(LENGTH)), self._record):
                        return
                    file.seek(0)
                    file.write(encode({**self._record, "count": count}))
            except (OSError, ValueError):  # removed, or a disk that is away for a moment
                continue


def is_same_writer(one: Any, other: Mapping[str, Any]) -> bool:
    """Return whether a record is that of a writer, whatever its count."""
    names = ("host", "pid", "since")
    return isinstance(one, dict) and all(one.get(name) == other.get(name) for name in names)


def is_counting(path: Path) -> bool:
    """Watch the record at `path`: return whether its writer counts, or has only begun.

    Returns False once the file is removed, or after `WATCH` seconds without a change.
    """
    first, end = _read(path), time.monotonic() + WATCH
    while first and time.monotonic() < end:
        time.sleep(min(0.1, BEAT))
        now = _read(path)
        if now != first:
            return bool(now)
    return False


def _read(path: Path) -> bytes:
    try:
        with open_regular(path, "rb") as file:
            return file.read(1 << 16)
    except OSError:
        return b""
