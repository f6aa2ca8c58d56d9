"""The pulse of a process: its phase and its step, in memory that other processes see too.

A beat is a store of 40 bytes to a mapped file, 1 us: no system call, and nothing that a full or
slow disk could hold up.
"""

import contextlib
import faulthandler
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jtrain.distributed.heartbeat.channel import STACKS, ChannelFiles, receive

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
_FAILED, _KEPT, _GRACE, _RUN, _FAULTS, _SIZE = 48, 64, 72, 82, 3584, 4096
FAULTS = (_SIZE - _FAULTS) // 8
"""Faults of a rehearsal whose moments fit."""


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


class Heartbeat:
    """Says what this process does; one thread at a time.

    Args:
        file: open, whose memory another process reads; None: this process alone sees it.
    """

    def __init__(self, file: int | None = None):
        self._memory = mmap.mmap(-1, _SIZE) if file is None else _mapped(file)
        self.watched = file is not None
        """Whether another process, `jtrain launch` say, watches over this one."""
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

    def rehearses(self, place: int) -> None:
        """Note that this process did itself the fault at that place of a rehearsal."""
        struct.pack_into("<d", self._memory, _FAULTS + 8 * place, time.monotonic())

    def was_rehearsed(self, place: int) -> bool:
        """Return whether the fault at that place of a rehearsal was done to this process."""
        return struct.unpack_from("<d", self._memory, _FAULTS + 8 * place)[0] > 0

    def begins(self, run: Path, grace: float) -> None:
        """Says where the run lies and how long it may take to end."""
        text = str(run.absolute()).encode()[: _FAULTS - _RUN]
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


def read_beat(file: int) -> Beat:
    """The last beat of another process, in a file that is open; number 0 if it has not begun."""
    memory = bytes(_SIZE)
    for _ in range(100):
        memory = os.pread(file, _SIZE, 0).ljust(_SIZE, b"\0")
        number, phase, step, _, check = _BEAT.unpack_from(memory)
        if check == _check(number, phase, step):  # or it was read in the middle of a beat
            break
    return _parse(memory)


def rehearsal_time(file: int, place: int) -> float:
    """Return when the fault at that place of a rehearsal was done to a process; 0: it was not."""
    (at,) = struct.unpack("<d", os.pread(file, 8, _FAULTS + 8 * place).ljust(8, b"\0"))
    return at


def note_rehearsed(file: int, place: int) -> None:
    """Tell a process that the fault at that place of a rehearsal was done to it."""
    os.pwrite(file, struct.pack("<d", time.monotonic()), _FAULTS + 8 * place)


def _check(number: int, phase: int, step: int) -> int:
    return (number ^ (step << 20) ^ (phase << 56)) & _ALL


def _parse(memory: bytes) -> Beat:
    count, phase, step, seconds, _ = _BEAT.unpack_from(memory)
    kept, grace, length = struct.unpack_from("<qdH", memory, _KEPT)
    (failed,) = struct.unpack_from("<d", memory, _FAILED)
    run = memory[_RUN : _RUN + length].decode(errors="replace")
    return Beat(count, PHASES[phase], step, seconds, kept, grace, run, failed)


def _mapped(file: int) -> mmap.mmap:
    os.ftruncate(file, _SIZE)
    return mmap.mmap(file, _SIZE)


def _own() -> Heartbeat:
    shared: ChannelFiles | None = receive(os.environ)
    if shared is None:
        return Heartbeat()
    # In C, so that it works while Python waits for C++ that holds the GIL.
    faulthandler.register(STACKS, file=shared.stacks, all_threads=True)
    pulse = Heartbeat(shared.pulse)
    os.close(shared.pulse)  # its memory stays
    return pulse


HEARTBEAT = _own()
"""Of this process."""
