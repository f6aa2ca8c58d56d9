"""Files without a name, which a process shares with the one that watches it.

Whichever of the two is killed, nothing of them is left on a disk.
"""

import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

STACKS = signal.SIGUSR2
"""Has a process that shares a channel write the stacks of its threads there."""
CHANNEL = "JTRAIN_PULSE"  # `FD:DEVICE:INODE` of the pulse and of the stacks


class ChannelFiles(NamedTuple):
    """The open files of a channel, for the process that is watched."""

    pulse: int
    stacks: int


class Channel:
    """The watcher's end of a channel: `environ` and `files` go to the process that it starts.

    ```
    with Channel() as channel:
        subprocess.Popen(command, env={**environ, **channel.environ}, pass_fds=channel.files)
        beat = read(channel.files.pulse)
    ```
    """

    def __init__(self):
        self.files = ChannelFiles(_unnamed("pulse"), _unnamed("stacks"))

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environ(self) -> Mapping[str, str]:
        """Where the process finds its end, after `pass_fds`."""
        return {CHANNEL: ",".join(f"{file}:{_identity(file)}" for file in self.files)}

    def stacks(self) -> bytes:
        """Return what the process has written at `STACKS`; nothing if it never did."""
        return os.pread(self.files.stacks, os.fstat(self.files.stacks).st_size, 0)

    def close(self) -> None:
        """Close this end."""
        for file in self.files:
            with contextlib.suppress(OSError):
                os.close(file)


def receive(environ: MutableMapping[str, str]) -> ChannelFiles | None:
    """Return this process's end of a channel; None where nobody watches.

    The variable is taken out of the environment, and the files are closed in what this process
    starts: that is another process. The files are compared with what was given, for a process whose
    parent never asked has the variable and other files under these numbers.
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
