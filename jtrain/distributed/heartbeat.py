"""Heartbeat of a process: its phase and its step, in memory shared with other processes.

A beat is a store of 32 bytes to a mapped file, 1 us: no system call, and nothing that a full or
slow disk could delay. The file is unnamed, so that nothing is left on a disk, whichever of the
process and its watcher is killed.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

STACKS = signal.SIGUSR2
"""The signal that makes a process write the stacks of its threads to its channel."""
CHANNEL = "JTRAIN_PULSE"  # `FD:DEVICE:INODE` of both files


class ChannelFiles(NamedTuple):
    """Open files of a channel, for the watched process."""

    beats: int
    stacks: int


class Channel:
    """The watcher's end of a channel: `environ` and `files` go to the process to be started.

    ```
    with Channel() as channel:
        subprocess.Popen(command, env={**environ, **channel.environ}, pass_fds=channel.files)
        beat = read_beat(channel.files.beats)
    ```
    """

    def __init__(self):
        self.files = ChannelFiles(_unnamed("beats"), _unnamed("stacks"))
        self.environ = {CHANNEL: ",".join(f"{file}:{_identity(file)}" for file in self.files)}
        """The variable by which the process finds its end, after `pass_fds`."""
        self._open = list(self.files)

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:  # once: the numbers are soon those of other files
            os.close(self._open.pop())

    def stacks(self) -> bytes:
        """Return the stacks that the process wrote on `STACKS`; empty before."""
        return os.pread(self.files.stacks, os.fstat(self.files.stacks).st_size, 0)


def _identity(file: int) -> str:
    stat = os.fstat(file)
    return f"{stat.st_dev}:{stat.st_ino}"


def _unnamed(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"jtrain-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# In the order of a step: of two processes at the same step, the one in the later phase waits for
# the one in the earlier phase. In the phases of `ALONE` a process waits for no other.
PHASES = ("start", "compile", "restore", "hooks", "data", "step", "eval", "save", "sampling", "end")
ALONE = {"start", "hooks", "data"}
_NUMBER = {name: number for number, name in enumerate(PHASES)}
_BEAT = struct.Struct("<Qqqd")  # number, phase, step, time
# Offsets of what is written apart from beats, by other threads too.
_FAILED = _BEAT.size  # d
_CHECKPOINT = _FAILED + 8  # q
_GRACE = _CHECKPOINT + 8  # dH, with the length of the path
_RUN = _GRACE + 10
_SIZE = 4096


class Beat(NamedTuple):
    """The last beat of a process."""

    number: int
    """Beats so far; 0: none yet."""
    phase: str
    step: int
    """The last step that was dispatched to the devices."""
    time: float
    """Time of the beat in seconds, by the monotonic clock of the machine."""
    checkpoint: int
    """The step of the newest checkpoint on the disk; 0: none."""
    grace: float
    """Seconds within which the process ends after a shutdown signal."""
    run: str
    """The run's directory; empty until it is known."""
    failed: float = 0.0
    """Time at which an error began to end the process, by the same clock; 0: no error."""


class Heartbeat:
    """Writer of the beats of this process; one thread at a time."""

    def __init__(self):
        self._memory = mmap.mmap(-1, _SIZE)
        self.watched = False
        """True if another process, such as `jtrain launch`, watches this one."""
        self.observer: Callable[[str], object] | None = None
        """Called with the phase that time counts for when another begins, in the same thread."""
        self._count, self._phase, self._step = 0, 0, 0
        self._counted, self._outermost = 0, -1  # phase that time counts for, and of `during`
        self._counts_process = False
        self._count_from(time.monotonic())

    def share(self, file: int) -> None:
        """Move the beats to the memory of an open file, which another process reads."""
        os.ftruncate(file, _SIZE)
        shared = mmap.mmap(file, _SIZE)
        shared[:] = self._memory[:]
        self._memory, self.watched = shared, True

    def beat(self, phase: str, step: int) -> None:
        """Record that a phase begins, or that a step was begun in it."""
        self._phase, self._step = _NUMBER[phase], step
        self._write()

    def dispatched(self, step: int) -> None:
        """Note the last step that was dispatched, for the next beat."""
        self._step = step

    def phase(self, phase: str) -> None:
        """Record that a phase begins, at the same step."""
        self._phase = _NUMBER[phase]
        self._write()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record a phase for the duration of a `with` block; then the previous phase.

        All time within counts for this phase, also that of a phase that begins within.
        """
        before, is_outermost = PHASES[self._phase], self._outermost < 0
        if is_outermost:
            self._outermost = _NUMBER[phase]
        self.phase(phase)
        try:
            yield
        finally:
            if is_outermost:
                self._outermost = -1
            self.phase(before)

    def begin_process(self) -> None:
        """Count time from the start of this process; for a program that is one run."""
        self._count_from(time.monotonic() - _process_age())
        self._counts_process = True
        self.phase("start")

    def seconds(self) -> dict[str, float]:
        """Return the seconds in each phase since the run began; they add up to all time since."""
        now, counted = time.monotonic(), self._seconds.copy()
        counted[self._counted] += now - self._counted_until
        return dict(zip(PHASES, counted, strict=True))

    def saved(self, step: int) -> None:
        """Record that a checkpoint is on the disk; on any thread."""
        struct.pack_into("<q", self._memory, _CHECKPOINT, step)

    def note_failure(self) -> None:
        """Record that an error ends this process; only the first call counts."""
        if not self.now().failed:
            struct.pack_into("<d", self._memory, _FAILED, time.monotonic())

    def begin_run(self, run: Path, grace: float) -> None:
        """Record the run's directory and its grace period in seconds.

        Time counts from here, unless this is the first run after `begin_process`.
        """
        if not self._counts_process:
            self._count_from(time.monotonic())
        self._counts_process = False
        text = str(run.absolute()).encode()[: _SIZE - _RUN]
        self._memory[_RUN : _RUN + len(text)] = text
        struct.pack_into("<dH", self._memory, _GRACE, grace, len(text))
        self.beat("start", 0)

    def now(self) -> Beat:
        """Return the last beat."""
        return _parse(self._memory[:])

    def _count_from(self, began: float) -> None:
        self._counted_until = began
        self._seconds = [0.0] * len(PHASES)

    def _write(self) -> None:
        now = time.monotonic()
        self._seconds[self._counted] += now - self._counted_until
        self._counted_until = now
        counted = self._phase if self._outermost < 0 else self._outermost
        if self.observer is not None and counted != self._counted:
            self.observer(PHASES[counted])
        self._counted = counted
        self._count += 1
        self._memory[: _BEAT.size] = _BEAT.pack(self._count, self._phase, self._step, now)


def read_beat(file: int) -> Beat:
    """Return the last beat of another process from its open file; number 0 before the first."""
    memory = os.pread(file, _SIZE, 0)
    while memory != (again := os.pread(file, _SIZE, 0)):  # it was read in the middle of a write
        memory = again
    return _parse(memory.ljust(_SIZE, b"\0"))


def _process_age() -> float:
    """Return the seconds since this process started, to 0.01 s; 0 where the system does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0.0
    return max(0.0, up - started / os.sysconf("SC_CLK_TCK"))


def _parse(memory: bytes) -> Beat:
    count, phase, step, at = _BEAT.unpack_from(memory)
    checkpoint, grace, length = struct.unpack_from("<qdH", memory, _CHECKPOINT)
    (failed,) = struct.unpack_from("<d", memory, _FAILED)
    run = memory[_RUN : _RUN + length].decode(errors="replace")
    return Beat(count, PHASES[phase], step, at, checkpoint, grace, run, failed)


HEARTBEAT = Heartbeat()
"""The heartbeat of this process; private until `connect_heartbeat` finds a watcher."""


def connect_heartbeat() -> None:
    """Share the heartbeat and the stacks of this process with its watcher, if it has one.

    The command line and the entry points of the Python API call this; the first call connects.

    The variable is removed from the environment, and child processes do not inherit the files: a
    child is another process. The identity of the files is compared with the variable, since a
    process that inherited only the variable has other files under these numbers.
    """
    found = []
    for part in os.environ.pop(CHANNEL, "").split(","):
        number, _, identity = part.partition(":")
        try:
            if _identity(int(number)) != identity:
                return
            os.set_inheritable(int(number), False)
        except (ValueError, OSError):
            return
        found.append(int(number))
    beats, stacks = found
    # faulthandler runs in C: it works while Python waits for C++ that holds the GIL.
    faulthandler.register(STACKS, file=stacks, all_threads=True)
    HEARTBEAT.share(beats)
    os.close(beats)  # the mapping stays
