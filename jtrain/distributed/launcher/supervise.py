"""Supervision of a process group: it is started, and restarted after a failure."""

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
from jtrain.errors import DONE, MISTAKE, STOPPED

FIRST, MOST = 0.25, 60.0  # seconds before the first restart, and at most before a later one
LATE = 5.0  # seconds beyond the grace period after which a signalled group is killed
QUIT = 128 + signal.SIGQUIT  # the exit code that a shell gives to a process ended by SIGQUIT


class ReceivedSignals:
    """Signals that this process received."""

    def __init__(self):
        self.time = 0.0
        """The time of the first signal; 0 before."""
        self.number = 0
        """The first signal."""
        self.second = ""
        """The name of the second signal, empty before; a repetition of the first does not count."""
        self.quit = False
        """True if SIGQUIT came: all are killed at once, with their stacks."""
        self._group: ProcessGroup | None = None
        self._request = ShutdownRequest()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Forward the first signal, and record a second one."""
        del frame
        which, name = self._request.signalled(), signal.Signals(number).name
        if which == "second":
            self.second = name
        if which == "first":
            self.time, self.number = time.monotonic(), number
            if self._group is not None:
                self._group.signal(number)
            line = (
                f"\njtrain launch: {name} was forwarded to all processes. From {REPEATS:g} s on a "
                f"second signal ends them at once.\n"
            )
            with contextlib.suppress(OSError):  # not sys.stderr, which may be in use
                os.write(2, line.encode())
            self._request.warned()

    def forward_to(self, group: ProcessGroup | None) -> None:
        """Forward signals to a group, including one that came before the group was complete."""
        self._group = group
        if group is not None and self.number:
            group.signal(self.number)

    def handle_quit(self, number: int, frame: FrameType | None) -> None:
        """Record SIGQUIT."""
        del number, frame
        self.time, self.quit = self.time or time.monotonic(), True


def supervise(
    begin: Callable[[], AbstractContextManager[ProcessGroup]],
    *,
    restarts: int = 0,
    program: str = "",
) -> int:
    """Run a group with at most `restarts` restarts; return the exit code of the last attempt.

    A failed attempt is restarted, unless the cause is a user error (2), a bad step that its guard
    stops at, or the third failure at the same place.

    Args:
        begin: starts a group, which exists in a `with` block.
        program: the words before the verb that start the same processes again.
    """
    history, spent = AttemptHistory(program), 0
    with forward_signals() as signals:
        while True:
            try:
                with begin() as group:
                    signals.forward_to(group)
                    exit = watch(group, signals)
                    attempt = Attempt.from_exit(exit, group.beats())
            finally:
                signals.forward_to(None)
            if not exit.failed or signals.time:
                break
            history.add(attempt)
            guarded = attempt.fault is not None and attempt.fault.guard
            if exit.code == MISTAKE or guarded or history.stuck or spent == restarts:
                break
            spent += 1
            write_error(_restart_note(attempt, f"Restarted ({spent} of {restarts})"))
            _rest(min(FIRST * 2 ** (history.repeats - 1), MOST), signals)
            if signals.time:
                return QUIT if signals.quit else STOPPED
    if exit.failed and restarts and history.last:
        write_error(history.diagnosis() if history.stuck else _guard_note(history.last))
    write_error(_exit_note(exit))
    return exit.code


def watch(group: ProcessGroup, signals: ReceivedSignals) -> GroupExit:
    """Watch a group until it ends; kill its last processes, and return its exit."""
    while (exit := group.poll()) is None:
        if signals.quit:
            exit = group.hang_exit(QUIT)
            break
        if signals.second:
            write_error(f"jtrain launch: second signal ({signals.second}): all are ended at once\n")
            exit = GroupExit(STOPPED, time.monotonic())
            break
        if signals.time and time.monotonic() > signals.time + _grace(group) + LATE:
            write_error(
                f"jtrain launch: not ended {_grace(group):.0f} s after the signal; a run resumes "
                f"from its last checkpoint\n"
            )
            exit = GroupExit(STOPPED, time.monotonic())
            break
        time.sleep(POLL)
    return group.kill(exit)


@contextlib.contextmanager
def forward_signals() -> Iterator[ReceivedSignals]:
    """Forward signals to the group in a `with` block; in the main thread only."""
    signals = ReceivedSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.handle) for number in shutdown_signals()}
    if signal.getsignal(signal.SIGQUIT) is not signal.SIG_IGN:
        before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, signals.handle_quit)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_error(text: str) -> None:
    """Write to stderr and flush."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _grace(group: ProcessGroup) -> float:
    return max((beat.grace for beat in group.beats()), default=0.0) or 25.0


def _rest(seconds: float, signals: ReceivedSignals) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not signals.time:
        time.sleep(POLL)


def _restart_note(attempt: Attempt, action: str) -> str:
    reason = attempt.exit.hang or _describe_end(attempt)
    return f"jtrain launch: {reason}. {action}{attempt.resume_point}.\n"


def _describe_end(attempt: Attempt) -> str:
    worker = attempt.exit.worker
    after = f"after step {attempt.step}" if attempt.step else "before the first step"
    reason = worker.exit_reason if worker is not None else f"exit code {attempt.exit.code}"
    return f"process {worker.index if worker else 0} ended ({reason}) {after}"


def _guard_note(attempt: Attempt) -> str:
    """Return a note if a bad step ended the attempt, so that there is no restart."""
    if attempt.fault is None or not attempt.fault.guard:
        return ""
    return (
        f"jtrain launch: the guard stopped the run at step {attempt.fault.step}, where a restart "
        f"would stop again: no restart.\n"
    )


def _exit_note(exit: GroupExit) -> str:
    if exit.hang:
        output = exit.worker.hidden_output if exit.worker else ""
        if "\n" in exit.stacks:  # the run has no directory for them
            return f"{output}{exit.stacks.strip()}\n{exit.hang}. All were ended.\n"
        stacks = f" The stacks of all: {exit.stacks}." if exit.stacks else ""
        return f"{output}{exit.hang}.{stacks} All were ended.\n"
    if exit.worker is None or exit.code in {DONE, STOPPED}:
        return ""
    if exit.same:
        return f"all processes failed ({exit.worker.exit_reason})\n"
    return exit.worker.failure_output()
