"""Begins a gang, and begins it again when it fails."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

from jtrain.distributed.heartbeat.shutdown_request import REPEATS, ShutdownRequest, shutdown_signals
from jtrain.distributed.launcher.attempts import Attempt, AttemptHistory
from jtrain.distributed.launcher.process_group import POLL, GroupExit, ProcessGroup
from jtrain.distributed.launcher.rehearsal import FaultRehearsal
from jtrain.errors import DONE, MISTAKE, STOPPED

FIRST, MOST = 0.25, 60.0  # seconds before the first and at most before a later new beginning
LATE = 5.0  # seconds beyond its grace after which a gang that was asked to end is ended
QUIT = 128 + signal.SIGQUIT  # the exit code, as a shell says it of a process that SIGQUIT ended


class ReceivedSignals:
    """Signals that came to this process."""

    def __init__(self):
        self.at = 0.0
        """When the first one came; 0 before."""
        self.number = 0
        """The first one."""
        self.again = ""
        """The second signal, empty before; one that repeats the first is none."""
        self.quits = False
        """Whether all are to be ended at once, with their stacks: by SIGQUIT."""
        self._gang: ProcessGroup | None = None
        self._request = ShutdownRequest()

    def came(self, number: int, frame: FrameType | None) -> None:
        """Hand the first one on, and take note of a second."""
        del frame
        which, name = self._request.signalled(), signal.Signals(number).name
        if which == "second":
            self.again = name
        if which == "first":
            self.at, self.number = time.monotonic(), number
            if self._gang is not None:
                self._gang.signal(number)
            line = (
                f"\njtrain launch: {name} was handed on to all processes. From {REPEATS:g} s on a "
                f"second signal ends them at once.\n"
            )
            with contextlib.suppress(OSError):  # not by sys.stderr, which may be in use
                os.write(2, line.encode())
            self._request.warned()

    def begun(self, gang: ProcessGroup | None) -> None:
        """Have the signals handed on to a gang, one that came while it began among them."""
        self._gang = gang
        if gang is not None and self.number:
            gang.signal(self.number)

    def quit(self, number: int, frame: FrameType | None) -> None:
        """Take note of SIGQUIT."""
        del number, frame
        self.at, self.quits = self.at or time.monotonic(), True


def supervise(
    begin: Callable[[], AbstractContextManager[ProcessGroup]],
    *,
    restarts: int = 0,
    chaos: FaultRehearsal | None = None,
    typed: str = "",
) -> int:
    """Gives the exit code of the last life, after `restarts` new beginnings at most.

    A life that failed is begun again, unless by a mistake in what was typed (2), by a bad step that
    its guard is to stop at, or at the same place for the third time.

    Args:
        begin: starts a gang, which is there in a `with` block.
        chaos: what is done to it, beside; a life that ended by it is always begun again.
        typed: what a person types before the verb to have the same processes again.
    """
    history, spent, chaos = AttemptHistory(typed), 0, chaos or FaultRehearsal()
    with handing_on() as asked:
        while True:
            with begin() as gang:
                asked.begun(gang)
                ending = live(gang, asked, chaos)
                life, rehearsed = Attempt.of(ending, gang.beats()), chaos.ended(gang, ending)
            asked.begun(None)
            if rehearsed and not asked.at:
                say(_told(life, "It was a rehearsal. Begun again"))
                continue
            if not ending.failed or asked.at:
                break
            history.add(life)
            guarded = life.judged is not None and life.judged.guard
            if ending.code == MISTAKE or guarded or history.stuck or spent == restarts:
                break
            spent += 1
            say(_told(life, f"Begun again ({spent} of {restarts})"))
            _rest(min(FIRST * 2 ** (history.alike - 1), MOST), asked)
            if asked.at:
                return QUIT if asked.quits else STOPPED
    say(chaos.report())
    if ending.failed and restarts and history.last:
        say(history.diagnosis() if history.stuck else _stopped(history.last))
    say(_last_words(ending))
    return ending.code


def live(gang: ProcessGroup, asked: ReceivedSignals, chaos: FaultRehearsal) -> GroupExit:
    """How a gang ended; none of it is there any more."""
    while (ending := gang.ending()) is None:
        chaos.look(gang)
        if asked.quits:
            ending = gang.stuck(QUIT)
            break
        if asked.again:
            say(f"jtrain launch: asked to end again ({asked.again}): all are ended at once\n")
            ending = GroupExit(STOPPED, time.monotonic())
            break
        if asked.at and time.monotonic() > asked.at + _grace(gang) + LATE:
            say(
                f"jtrain launch: not ended {_grace(gang):.0f} s after they were asked to; the last "
                f"checkpoint is what a run goes on from\n"
            )
            ending = GroupExit(STOPPED, time.monotonic())
            break
        time.sleep(POLL)
    return gang.end(ending)


@contextlib.contextmanager
def handing_on() -> Iterator[ReceivedSignals]:
    """Within, signals are noted and handed on to the gang; in the main thread only."""
    asked = ReceivedSignals()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, asked.came) for number in shutdown_signals()}
    if signal.getsignal(signal.SIGQUIT) is not signal.SIG_IGN:
        before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, asked.quit)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """On the error stream, at once."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _grace(gang: ProcessGroup) -> float:
    return max((beat.grace for beat in gang.beats()), default=0.0) or 25.0


def _rest(seconds: float, asked: ReceivedSignals) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not asked.at:
        time.sleep(POLL)


def _told(life: Attempt, what: str) -> str:
    return f"jtrain launch: {life.ending.hang or _ended(life)}. {what}{life.begins}.\n"


def _ended(life: Attempt) -> str:
    who = life.ending.who
    after = f"after step {life.step}" if life.step else "before the first step"
    return f"process {who.index if who else 0} ended ({_how(life.ending)}) {after}"


def _stopped(life: Attempt) -> str:
    """Why it is not begun again, where a bad step has ended it."""
    if life.judged is None or not life.judged.guard:
        return ""
    return (
        f"jtrain launch: its guard stopped the run at step {life.judged.step}, which would come "
        f"again: it is not begun again.\n"
    )


def _how(ending: GroupExit) -> str:
    return ending.who.how if ending.who is not None else f"exit code {ending.code}"


def _last_words(ending: GroupExit) -> str:
    if ending.hang:
        said = ending.who.unshown if ending.who else ""
        if "\n" in ending.stacks:  # there is no directory that they could lie in
            return f"{said}{ending.stacks.strip()}\n{ending.hang}. All were ended.\n"
        stacks = f" The stacks of all: {ending.stacks}." if ending.stacks else ""
        return f"{said}{ending.hang}.{stacks} All were ended.\n"
    if ending.who is None or ending.code in {DONE, STOPPED}:
        return ""
    return ending.who.last_words()
