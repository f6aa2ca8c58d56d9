"""Processes that live and die together, watched from outside."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jtrain.distributed.heartbeat import Beat, Patience, WatchedProcess
from jtrain.distributed.heartbeat.shutdown_request import ASKS
from jtrain.distributed.launcher.culprit import guilty
from jtrain.distributed.launcher.worker import WorkerProcess
from jtrain.errors import DONE, HUNG, MISTAKE, STOPPED
from jtrain.io.private_files import create_private

POLL = 0.02  # seconds
FAREWELL = 1.0  # seconds that the others have to say what is wrong with them too, when one failed
OTHERS = 2.0  # seconds after which, where one has ended as it was asked to, the others are asked
# Seconds after which they are ended: they wait for it in a sum. Whatever was saved was saved before
# the first one ended.
QUIT = 20.0
# What a process never does because another one has ended: JAX ends it by SIGABRT then.
KILLED = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS}
DUMP = 2.0  # seconds at most for the stacks of a process to be written
BEATS_WITHIN = 0.2  # seconds; what beats is not stopped, and the kernel is not asked
# Seconds for which a process was stopped by a signal when another failed: that waited for it.
STOPPED_BEFORE = 5.0


@dataclasses.dataclass(frozen=True)
class GroupExit:
    """How a gang ended."""

    code: int
    at: float
    """When it was noticed, by the monotonic clock."""
    who: WorkerProcess | None = None
    """That failed first, or is stuck."""
    hang: str = ""
    """Who is stuck, where and since when; empty if nobody was."""
    stacks: str = ""
    """Where the stacks of all lie, or the stacks, if somebody was."""
    down: float = 0.0
    """When none of them was there any more."""

    @property
    def failed(self) -> bool:
        """Whether it is to be begun again."""
        return self.code not in {DONE, STOPPED}


class ProcessGroup:
    """Members that were begun; in a `with` block, after which none of them is there.

    Args:
        command: what each runs.
        environs: the environment of each.
        patience: for each phase.
        beats: whether they have a pulse from the start; without one a process is not watched, but
            for a signal that stops it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environs: Sequence[Mapping[str, str]],
        *,
        patience: Patience,
        beats: bool = False,
    ):
        self._beats = beats
        self._stack = contextlib.ExitStack()
        self.began = time.monotonic()
        self.members: list[WorkerProcess] = []
        self._watched: list[WatchedProcess] = []
        self._looked = self.began
        self.asked = False
        """Whether they were asked to end."""
        with self._stack:
            for index, environ in enumerate(environs):
                self.members.append(
                    self._stack.enter_context(WorkerProcess(index, command, environ))
                )
                self._watched.append(WatchedProcess(patience))
            self._stack = self._stack.pop_all()

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def beats(self) -> list[Beat]:
        """The last beat of each."""
        return [member.beat() for member in self.members]

    def ending(self) -> GroupExit | None:
        """How it ended, as soon as one failed or is stuck, or all have ended; None before."""
        now = time.monotonic()
        seconds, self._looked = min(now - self._looked, 1.0), now
        running = [member for member in self.members if member.code is None]
        if failed := self._first_failed():
            return self._held_up(failed, running) or GroupExit(
                failed.exit_code, failed.ended, failed
            )
        if not running:
            return GroupExit(max(self._code(member) for member in self.members), now)
        stopped = [m.ended for m in self.members if m.code is not None and m.code == STOPPED]
        if stopped and not self.asked and now > min(stopped) + OTHERS:
            self.signal(signal.SIGTERM)  # one was asked to end and has: so shall the others
        if stopped and now > min(stopped) + QUIT:
            return GroupExit(STOPPED, now)
        late = [self._late(member, seconds) for member in running]
        return self.stuck(HUNG) if any(late) else None

    def end(self, ending: GroupExit) -> GroupExit:
        """Ends all; the others say first what is wrong with them, where one has said that."""
        fails = ending.failed and not ending.hang  # one that is stuck may fail when it goes on
        if fails and ending.who is not None and ending.who.code not in KILLED | {None}:
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

    def stuck(self, code: int) -> GroupExit:
        """Has all write their stacks, and says who holds up the others."""
        running = [member for member in self.members if member.code is None]
        if not running:  # the last has ended a moment ago
            return GroupExit(code, time.monotonic())
        watched = [self._watched[member.index] for member in running]
        for member in running:
            self._late(member, 0.0)  # or one that was never looked at has no beat
        found = guilty(running, watched)
        at = time.monotonic()
        self._dump([member for member in running if member.beat().number > 0])
        run = next((Path(run) for run in (member.beat().run for member in running) if run), None)
        return GroupExit(code, at, found.member, found.words, _written(running, run))

    def _late(self, member: WorkerProcess, seconds: float) -> bool:
        beat, watched = member.beat(), self._watched[member.index]
        stopped = watched.still > BEATS_WITHIN and member.stopped
        late = watched.look(beat, seconds, stopped=stopped)
        return late and (beat.number > 0 or self._beats or watched.stopped_too_long)

    def _held_up(self, failed: WorkerProcess, running: Sequence[WorkerProcess]) -> GroupExit | None:
        """A hang, where a process failed because another one was stopped by a signal.

        JAX, gloo and the meeting of the processes have limits of their own, which may come before
        that of `patience`; what they say names the process that waited.
        """
        held = [m for m in running if self._watched[m.index].stopped > STOPPED_BEFORE]
        if not held or failed.code in KILLED | {MISTAKE}:
            return None
        ending = self.stuck(HUNG)
        waited = f"; process {failed.index} waited for it, and failed ({failed.how})"
        return dataclasses.replace(ending, hang=ending.hang + waited)

    def _code(self, member: WorkerProcess) -> int:
        """As it ended; `STOPPED` too where the signal came before anything was to be lost."""
        signalled = member.code is not None and -member.code in ASKS
        return STOPPED if self.asked and signalled else member.exit_code

    def _first_failed(self) -> WorkerProcess | None:
        ended = [member for member in self.members if member.code is not None]
        failed = [member for member in ended if self._code(member) not in {DONE, STOPPED}]
        if not failed:
            return None
        # Ends alone do not tell who was the first: the kernel closes what a process holds open, by
        # which another fails, before it says that the process is gone. So each says that it fails.
        said = {member.index: member.beat().failed for member in ended}
        when = lambda m: (m.code not in KILLED, said[m.index] or m.ended)
        return min(failed, key=when)

    def _dump(self, members: Sequence[WorkerProcess]) -> None:
        for member in members:
            member.dump()
        deadline = time.monotonic() + DUMP
        for member in members:
            size = -1
            while time.monotonic() < deadline and (size <= 0 or size != len(member.stacks())):
                size = len(member.stacks())
                time.sleep(POLL)


def _written(members: Sequence[WorkerProcess], run: Path | None) -> str:
    """Write the stacks into a run's directory and return where; without one, return the stacks."""
    stacks = {member.index: text for member in members if (text := member.stacks())}
    if run is None or not run.is_dir():
        shown = [f"process {i}:\n{x.decode(errors='replace')}" for i, x in stacks.items()]
        return "\n" + "".join(shown) if shown else ""
    for index, text in stacks.items():
        with contextlib.suppress(OSError), create_private(run / f"stacks-{index}.txt") as file:
            file.write(text)
    return f"{run}/stacks-*.txt"
