"""The pulse of a process: its phase and its step, in memory that other processes see too.

A beat is a store of 40 bytes to a mapped file, 1 us: no system call, and nothing that a full or
slow disk could hold up.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STACKS = signal.SIGUSR2
FOLDER = "JTRAIN_PULSE"  # where `jtrain launch` wants to read it; the file is called by the process
# In the order of a step: of two processes at the same step, the one further down waits for the
# one further up. In those of `ALONE` a process waits for no other.
PHASES = (
    *("start", "compile", "restore", "hooks", "data", "step"),
    *("eval", "save", "sampling", "end"),
)
ALONE = {"start", "hooks", "data"}
_NUMBER = {name: number for number, name in enumerate(PHASES)}
_BEAT = struct.Struct("<QqqdQ")  # number, phase, step, seconds, and a sum of the first three
_LENGTH, _ALL = _BEAT.size, 2**64 - 1
# Where these lie, the length before the run's path; and how long it all is.
_FAILED, _KEPT, _GRACE, _RUN, _SIZE = 48, 64, 72, 82, 4096


class Beat(NamedTuple):
    """What a process said last."""

    number: int
    """Beats so far; 0: it has said nothing."""
    phase: str
    step: int
    """The last that was given to the devices."""
    seconds: float
    """When, by the monotonic clock of the machine."""
    kept: int
    """The step of the last checkpoint that is on the disk; 0: none."""
    grace: float
    """Seconds within which it ends when it is asked to."""
    run: str
    """The run's directory; empty while it is not known."""
    failed: float = 0.0
    """When an error began to end it, by the same clock; 0: none has."""


class Pulse:
    """Says what this process does; one thread at a time.

    Args:
        path: of the file that others read; None: this process alone sees it.
    """

    def __init__(self, path: Path | None = None):
        self._memory = mmap.mmap(-1, _SIZE) if path is None else _mapped(path)
        self._count, self._phase, self._step = 0, 0, 0

    def beat(self, phase: str, step: int) -> None:
        """Says that a phase begins, or that a step was begun in it."""
        self._phase, self._step = _NUMBER[phase], step
        self._say()

    def phase(self, phase: str) -> None:
        """Says that a phase begins, at the same step."""
        self._phase = _NUMBER[phase]
        self._say()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Within it a phase lasts; after it the one of before goes on."""
        before = PHASES[self._phase]
        self.phase(phase)
        try:
            yield
        finally:
            self.phase(before)

    def kept(self, step: int) -> None:
        """Says that a checkpoint is on the disk; on any thread."""
        struct.pack_into("<q", self._memory, _KEPT, step)

    def fails(self) -> None:
        """Says that an error ends this process; the first time counts."""
        if not self.now().failed:
            struct.pack_into("<d", self._memory, _FAILED, time.monotonic())

    def begins(self, run: Path, grace: float) -> None:
        """Says where the run lies and how long it may take to end."""
        text = str(run.absolute()).encode()[: _SIZE - _RUN]
        self._memory[_RUN : _RUN + len(text)] = text
        struct.pack_into("<dH", self._memory, _GRACE, grace, len(text))
        self.beat("start", 0)

    def now(self) -> Beat:
        """The last beat."""
        return _parse(self._memory[:])

    def _say(self) -> None:
        self._count, phase, step = self._count + 1, self._phase, self._step
        check = (self._count ^ (step << 20) ^ (phase << 56)) & _ALL  # in line: it is all we pay for
        self._memory[:_LENGTH] = _BEAT.pack(self._count, phase, step, time.monotonic(), check)


def read(path: Path) -> Beat:
    """The last beat of another process; number 0 if it has not begun."""
    memory = bytes(_SIZE)
    for _ in range(100):
        try:
            memory = path.read_bytes().ljust(_SIZE, b"\0")
        except OSError:
            break
        number, phase, step, _, check = _BEAT.unpack_from(memory)
        if check == _check(number, phase, step):  # or it was read in the middle of a beat
            break
    return _parse(memory)


def file_of(folder: Path, process: int) -> Path:
    """Where the process of that number beats."""
    return folder / f"pulse-{process}"


def stacks_of(folder: Path, process: int) -> Path:
    """Where that process writes the stacks of its threads at a signal (`STACKS`)."""
    return folder / f"stacks-{process}.txt"


def _check(number: int, phase: int, step: int) -> int:
    return (number ^ (step << 20) ^ (phase << 56)) & _ALL


def _parse(memory: bytes) -> Beat:
    count, phase, step, seconds, _ = _BEAT.unpack_from(memory)
    kept, grace, length = struct.unpack_from("<qdH", memory, _KEPT)
    (failed,) = struct.unpack_from("<d", memory, _FAILED)
    run = memory[_RUN : _RUN + length].decode(errors="replace")
    return Beat(count, PHASES[phase], step, seconds, kept, grace, run, failed)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("a+b") as file:
        file.truncate(_SIZE)
        return mmap.mmap(file.fileno(), _SIZE)


def _own() -> Pulse:
    # Taken out of the environment: what this process starts is not this process.
    told, process = os.environ.pop(FOLDER, ""), int(os.environ.get("JTRAIN_PROCESS") or 0)
    if not told:
        return Pulse()
    # In C, so that it works while Python waits for C++ that holds the GIL.
    faulthandler.register(STACKS, file=stacks_of(Path(told), process).open("w"), all_threads=True)
    return Pulse(file_of(Path(told), process))


PULSE = _own()
"""Of this process."""
