"""Begins a gang, and begins it again when it fails."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from jtrain.errors import DONE, HUNG, MISTAKE, STOPPED
from jtrain.launch.chaos import Chaos
from jtrain.launch.gang import POLL, Ending, Gang, own_folder
from jtrain.launch.history import History, Life
from jtrain.pulse.leaving import ASKS

FIRST, MOST = 0.25, 60.0  # seconds before the first and at most before a later new beginning
LATE = 5.0  # seconds beyond its grace after which a gang that was asked to end is ended


class Asked:
    """Signals that came to this process."""

    def __init__(self):
        self.times = 0
        self.at = 0.0
        """When the first one came."""
        self.gang: Gang | None = None
        """They are handed on to it."""

    def came(self, number: int, frame: FrameType | None) -> None:
        """Hands one on."""
        del frame
        self.times += 1
        self.at = self.at or time.monotonic()
        if self.gang is not None:
            self.gang.signal(number)


def supervise(
    begin: Callable[[Path], Gang],
    *,
    restarts: int = 0,
    chaos: Chaos | None = None,
    typed: str = "",
) -> int:
    """Gives the exit code of the last life, after `restarts` new beginnings at most.

    A life that failed is begun again, unless by a mistake in what was typed (2), by a bad step that
    its guard is to stop at, or at the same place for the third time.

    Args:
        begin: starts a gang whose pulses lie in the folder it is given.
        chaos: what is done to it, beside; a life that ended by it is always begun again.
        typed: what a person types before the verb to have the same processes again.
    """
    history, spent, chaos = History(typed), 0, chaos or Chaos()
    with handing_on() as asked:
        while True:
            with own_folder() as folder, begin(folder) as gang:
                asked.gang = gang
                ending = live(gang, asked, chaos)
                life, rehearsed = Life.of(ending, gang.beats()), chaos.ended(gang, ending)
            asked.gang = None
            if rehearsed and not asked.times:
                say(_told(life, "It was a rehearsal. Begun again"))
                continue
            if not ending.failed or asked.times:
                break
            history.add(life)
            guarded = life.judged is not None and life.judged.guard
            if ending.code == MISTAKE or guarded or history.stuck or spent == restarts:
                break
            spent += 1
            say(_told(life, f"Begun again ({spent} of {restarts})"))
            _rest(min(FIRST * 2 ** (history.alike - 1), MOST), asked)
            if asked.times:
                return STOPPED
    say(chaos.report())
    if ending.failed and restarts and history.last:
        say(history.diagnosis() if history.stuck else _stopped(history.last))
    say(_last_words(ending))
    return ending.code


def live(gang: Gang, asked: Asked, chaos: Chaos) -> Ending:
    """How a gang ended; none of it is there any more."""
    while (ending := gang.ending()) is None:
        chaos.look(gang)
        if asked.times > 1:
            ending = Ending(STOPPED, time.monotonic())
            break
        if asked.times and time.monotonic() > asked.at + _grace(gang) + LATE:
            say(
                f"jtrain launch: not ended {_grace(gang):.0f} s after they were asked to; the last "
                f"checkpoint is what a run goes on from\n"
            )
            ending = Ending(STOPPED, time.monotonic())
            break
        time.sleep(POLL)
    return gang.end(ending)


@contextlib.contextmanager
def handing_on() -> Iterator[Asked]:
    """Within, signals are noted and handed on to the gang; in the main thread only."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, asked.came) for number in ASKS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """On the error stream, at once."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _grace(gang: Gang) -> float:
    return max((beat.grace for beat in gang.beats()), default=0.0) or 25.0


def _rest(seconds: float, asked: Asked) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not asked.times:
        time.sleep(POLL)


def _told(life: Life, what: str) -> str:
    return f"jtrain launch: {life.ending.hang or _ended(life)}. {what}{life.begins}.\n"


def _ended(life: Life) -> str:
    who = life.ending.who
    after = f"after step {life.step}" if life.step else "before the first step"
    return f"process {who.index if who else 0} ended ({_how(life.ending)}) {after}"


def _stopped(life: Life) -> str:
    """Why it is not begun again, where a bad step has ended it."""
    if life.judged is None or not life.judged.guard:
        return ""
    return (
        f"jtrain launch: its guard stopped the run at step {life.judged.step}, which would come "
        f"again: it is not begun again.\n"
    )


def _how(ending: Ending) -> str:
    return ending.who.how if ending.who is not None else f"exit code {ending.code}"


def _last_words(ending: Ending) -> str:
    if ending.code == HUNG and ending.hang:
        said = ending.who.unshown if ending.who else ""
        return f"{said}{ending.hang}. The stacks of all: {ending.stacks}. All were ended.\n"
    if ending.who is None or ending.code in {DONE, STOPPED}:
        return ""
    return ending.who.last_words()
