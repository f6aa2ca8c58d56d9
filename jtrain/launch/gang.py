"""Processes that live and die together, watched from outside."""

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jtrain.errors import DONE, HUNG, STOPPED
from jtrain.launch.guilty import guilty
from jtrain.launch.member import Member
from jtrain.pulse import Beat, Patience, Watched, read
from jtrain.pulse.leaving import ASKS
from jtrain.pulse.pulse import FOLDER, STACKS, file_of, stacks_of

POLL = 0.02  # seconds
FAREWELL = 1.0  # seconds that the others have to say what is wrong with them too, when one failed
OTHERS = 2.0  # seconds after which, where one has ended as it was asked to, the others are asked
# Seconds after which they are ended: they wait for it in a sum. Whatever was saved was saved before
# the first one ended, and JAX's heartbeat, at 30, would make a failure of it.
QUIT = 20.0
# What a process never does because another one has ended: JAX ends it by SIGABRT then.
KILLED = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS}
DUMP = 2.0  # seconds at most for the stacks of a process to be written


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a gang ended."""

    code: int
    at: float
    """When it was noticed, by the monotonic clock."""
    who: Member | None = None
    """That failed first, or is stuck."""
    hang: str = ""
    """Who is stuck, where and since when; empty if nobody was."""
    stacks: str = ""
    """Where the stacks of all lie, if somebody was."""
    down: float = 0.0
    """When none of them was there any more."""

    @property
    def failed(self) -> bool:
        """Whether it is to be begun again."""
        return self.code not in {DONE, STOPPED}


class Gang:
    """Members that were begun; in a `with` block, after which none of them is there.

    Args:
        command: what each runs.
        environs: the environment of each.
        folder: an empty one, for their pulses.
        patience: for each phase.
        beats: whether they have a pulse from the start; without one a process is not watched.
    """

    def __init__(
        self,
        command: Sequence[str],
        environs: Sequence[Mapping[str, str]],
        folder: Path,
        *,
        patience: Patience,
        beats: bool = False,
    ):
        self.folder, self._beats = folder, beats
        self._stack = contextlib.ExitStack()
        self.began = time.monotonic()
        self.members: list[Member] = []
        self._watched: list[Watched] = []
        self._looked = self.began
        self.asked = False
        """Whether they were asked to end."""
        with self._stack:
            for index, environ in enumerate(environs):
                told = {**environ, FOLDER: str(folder)}
                self.members.append(self._stack.enter_context(Member(index, command, told)))
                self._watched.append(Watched(patience))
            self._stack = self._stack.pop_all()

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def beats(self) -> list[Beat]:
        """The last beat of each."""
        return [read(file_of(self.folder, member.index)) for member in self.members]

    def ending(self) -> Ending | None:
        """How it ended, as soon as one failed or is stuck, or all have ended; None before."""
        now = time.monotonic()
        seconds, self._looked = min(now - self._looked, 1.0), now
        if failed := self._first_failed():
            return Ending(failed.exit_code, failed.ended, failed)
        running = [member for member in self.members if member.code is None]
        if not running:
            return Ending(max(self._code(member) for member in self.members), now)
        stopped = [m.ended for m in self.members if m.code is not None and m.code == STOPPED]
        if stopped and not self.asked and now > min(stopped) + OTHERS:
            self.signal(signal.SIGTERM)  # one was asked to end and has: so shall the others
        if stopped and now > min(stopped) + QUIT:
            return Ending(STOPPED, now)
        late = []
        for member in running:
            beat, watched = read(file_of(self.folder, member.index)), self._watched[member.index]
            late.append(watched.look(beat, seconds) and (beat.number > 0 or self._beats))
        return self._hang(running) if any(late) else None

    def end(self, ending: Ending) -> Ending:
        """Ends all; the others say first what is wrong with them, where one has said that."""
        if ending.failed and ending.who is not None and ending.who.code not in KILLED | {None}:
            deadline = time.monotonic() + FAREWELL
            while time.monotonic() < deadline and any(m.code is None for m in self.members):
                time.sleep(POLL)
            first = self._first_failed() or ending.who  # of all that have ended by themselves
            ending = dataclasses.replace(ending, code=first.exit_code, who=first)
        for member in self.members:
            member.end()
        return dataclasses.replace(ending, down=time.monotonic())

    def signal(self, number: int) -> None:
        """Hands a signal on to all."""
        self.asked = True
        for member in self.members:
            member.signal(number)

    def _code(self, member: Member) -> int:
        """As it ended; `STOPPED` too where the signal came before anything was to be lost."""
        signalled = member.code is not None and -member.code in ASKS
        return STOPPED if self.asked and signalled else member.exit_code

    def _first_failed(self) -> Member | None:
        ended = [member for member in self.members if member.code is not None]
        failed = [member for member in ended if self._code(member) not in {DONE, STOPPED}]
        if not failed:
            return None
        # Ends alone do not tell who was the first: the kernel closes what a process holds open, by
        # which another fails, before it says that the process is gone. So each says that it fails.
        said = {member.index: read(file_of(self.folder, member.index)).failed for member in ended}
        when = lambda m: (m.code not in KILLED, said[m.index] or m.ended)
        return min(failed, key=when)

    def _hang(self, running: Sequence[Member]) -> Ending:
        """Has all write their stacks, and says who holds up the others."""
        watched = [self._watched[member.index] for member in running]
        found = guilty(running, watched)
        beats = [each.beat for each in watched if each.beat]
        at = time.monotonic()
        self._dump([m for m, beat in zip(running, beats, strict=True) if beat.number > 0])
        run = next((Path(beat.run) for beat in beats if beat.run), self.folder)
        run = run if run.is_dir() else self.folder
        for member in running if run != self.folder else []:
            with contextlib.suppress(OSError):
                shutil.move(stacks_of(self.folder, member.index), run)
        return Ending(HUNG, at, found.member, found.words, f"{run}/stacks-*.txt")

    def _dump(self, members: Sequence[Member]) -> None:
        for member in members:
            member.signal(STACKS)
            member.signal(signal.SIGCONT)  # one that is stopped writes when it goes on
        deadline = time.monotonic() + DUMP
        for member in members:
            file, size = stacks_of(self.folder, member.index), -1
            while time.monotonic() < deadline and (size <= 0 or size != _size(file)):
                size = _size(file)
                time.sleep(POLL)


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for the pulses of a gang; it goes with the block, unless stacks are left there."""
    folder = Path(tempfile.mkdtemp(prefix="jtrain-"))
    try:
        yield folder
    finally:
        for file in folder.iterdir():
            if not file.name.startswith("stacks-") or not _size(file):
                file.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(file).st_size
    return 0
