"""Unnamed files that a process shares with its watcher.

Nothing is left on a disk, whichever of the two is killed.
"""

import os
import signal
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

STACKS = signal.SIGUSR2
"""The signal that makes a process write the stacks of its threads to its channel."""
CHANNEL = "JTRAIN_PULSE"  # `FD:DEVICE:INODE` of both files


class ChannelFiles(NamedTuple):
    """Open files of a channel, for the watched process."""

    pulse: int
    stacks: int


class Channel:
    """The watcher's end of a channel: `environ` and `files` go to the process to be started.

    ```
    with Channel() as channel:
        subprocess.Popen(command, env={**environ, **channel.environ}, pass_fds=channel.files)
        beat = read(channel.files.pulse)
    ```
    """

    def __init__(self):
        self.files = ChannelFiles(_unnamed("pulse"), _unnamed("stacks"))
        self._open = list(self.files)

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environ(self) -> Mapping[str, str]:
        """The variable by which the process finds its end, after `pass_fds`."""
        return {CHANNEL: ",".join(f"{file}:{_identity(file)}" for file in self.files)}

    def stacks(self) -> bytes:
        """Return the stacks that the process wrote on `STACKS`; empty before."""
        return os.pread(self.files.stacks, os.fstat(self.files.stacks).st_size, 0)

    def close(self) -> None:
        """Close this end, once: its numbers are soon those of other files."""
        while self._open:
            os.close(self._open.pop())


def receive(environ: MutableMapping[str, str]) -> ChannelFiles | None:
    """Return this process's end of a channel; None if the process is not watched.

    The variable is removed from the environment, and child processes do not inherit the files: a
    child is another process. The identity of the files is compared with the variable, since a
    process that inherited only the variable has other files under these numbers.
    """
    found = []
    for part in environ.pop(CHANNEL, "").split(","):
        number, _, identity = part.partition(":")
        try:
            if _identity(int(number)) != identity:
                return None
            os.set_inheritable(int(number), False)
        except (ValueError, OSError):
            return None
        found.append(int(number))
    return ChannelFiles(*found) if len(found) == 2 else None


def _identity(file: int) -> str:
    stat = os.fstat(file)
    return f"{stat.st_dev}:{stat.st_ino}"


def _unnamed(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"jtrain-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
