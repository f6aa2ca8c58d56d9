"""Holders of a file's lock."""

import fcntl
import os
import re
import struct
import sys
from pathlib import Path

_LOCK = "hhqqi"  # struct flock of Linux: type, whence, start, length, process


def lock_holder(file: Path) -> int:
    """Return the process that holds a lock on a file: 0 for none, -1 for an unknown process."""
    try:
        with file.open("r+") as opened:
            if sys.platform != "linux":
                return 0
            asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = struct.unpack(_LOCK, fcntl.fcntl(opened, fcntl.F_GETLK, asked))
            if answer[0] != fcntl.F_UNLCK:
                return answer[4] or -1
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _in_table(os.fstat(opened.fileno()).st_ino)
    except (OSError, struct.error):
        pass
    return 0


def _in_table(inode: int) -> int:
    """Return the process that Linux's table of locks names for a file; -1 if it names none."""
    try:
        table = Path("/proc/locks").read_text()
    except OSError:
        return -1
    found = re.search(rf"(\d+) [0-9a-f]+:[0-9a-f]+:{inode} ", table)
    return int(found[1]) if found else -1
