"""Control of shim.c: file operations of this process kill it, fail, or are recorded."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from jtrain.errors import UserError

SOURCE = Path(__file__).with_name("shim.c")
KILLS = -1
_EVER = 2**40


def build(directory: Path) -> Path:
    """Return the shared object to preload; compile it into `directory` if needed.

    Raises:
        UserError: if there is no C compiler, or it fails.
    """
    name = f"shim-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if (path := directory / name).exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    if (compiler := shutil.which("cc")) is None:
        raise UserError("the shim for file operations is in C, and cc is missing: install it")
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        made = Path(temporary) / name
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(made), str(SOURCE)]
        done = subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed: {done.stderr[-500:]}")
        made.rename(path)  # two processes may build it at once
    return path


class Shim:
    """The shim of this process, which was started with the shim preloaded."""

    def __init__(self):
        self._loaded = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._loaded.chaos_count.restype = ctypes.c_long

    def watch(self, folder: Path, log: Path | None = None) -> None:
        """Count the operations under `folder`; record them in `log`, which lies elsewhere."""
        self._arm(folder, 1, 0, 0, 0, log)

    def kill_at(self, folder: Path, number: int) -> None:
        """Kill the process right before the operation with that number, from 1."""
        self._arm(folder, number, number, KILLS, 0, None)

    def fail(
        self, folder: Path, error: int, first: int = 1, last: int = _EVER, deletions: int = 0
    ) -> None:
        """Make operations `first .. last` fail with an errno, except deletions.

        Args:
            deletions: the disk has space after so many deletions; 0: never.
        """
        self._arm(folder, first, last, error, deletions, None)

    def mark(self, number: int) -> None:
        """Record a number among the operations."""
        self._loaded.chaos_mark(ctypes.c_long(number))

    def count(self) -> int:
        """Return the operations since the last call of another method."""
        return self._loaded.chaos_count()

    def rest(self) -> None:
        """Stop counting, and let all operations pass."""
        self._loaded.chaos_disarm()

    def _arm(
        self, folder: Path, first: int, last: int, action: int, deletions: int, log: Path | None
    ) -> None:
        descriptor = -1
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        counts = ctypes.c_long(first), ctypes.c_long(last)
        path = str(folder.resolve()).encode()
        self._loaded.chaos_arm(path, *counts, action, ctypes.c_long(deletions), descriptor)
