"""Supervision of a process group: it is started, and restarted after a failure."""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from jtrain.distributed.heartbeat import Beat
from jtrain.distributed.launcher.process_group import POLL, GroupExit, ProcessGroup
from jtrain.distributed.shutdown import REPEATS, ShutdownRequest, shutdown_signals
from jtrain.errors import DONE, FAULT, MISTAKE, STOPPED, CheckpointError
from jtrain.io.jsonl import complete_rows
from jtrain.io.regular_files import read_json

ATTEMPTS = 3  # attempts that end at the same step: the failure is systematic


@dataclasses.dataclass(frozen=True)
class ReportedFault:
    """A fault that the run found in itself: the run ends with it after a restart, too."""

    step: int
    batch: int | None
    """The batch of that step, from 0; None: unknown."""
    why: str
    guard: bool
    """True if a bad step ended the run, and its guard forbids another attempt."""

    @classmethod
    def read(cls, run: str) -> "ReportedFault | None":
        """Read the fault from the directory of a run; None unless the run itself reports one."""
        try:
            status = read_json(Path(run) / "run.json", inside=Path(run)) if run else {}
        except (OSError, ValueError):
            return None
        if not isinstance(status, dict) or status.get("status") != "failed":
            return None
        if not status.get("why"):
            return None
        bad = next(reversed(_rows(run, "events.jsonl")), {})
        step, batch = bad.get("step", status.get("step", 0)), bad.get("batch")
        return cls(
            step if type(step) is int else 0,
            batch if type(batch) is int else None,
            f"{status['why']}",
            bad.get("done") == "stopped",
        )


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt of a run: its progress and its end."""

    exit: GroupExit
    step: int
    """The last step that all processes began."""
    checkpoint: int
    """The newest checkpoint that the attempt sealed; 0: none."""
    run: str
    """The run's directory; empty before it was created."""
    fault: ReportedFault | None = None
    """The fault that the run reports, if any."""

    @classmethod
    def from_exit(cls, exit: GroupExit, beats: list[Beat]) -> "Attempt":
        """Build an attempt from its end and the last beats of its processes."""
        run = next((beat.run for beat in beats if beat.run), "")
        step, checkpoint = min(beat.step for beat in beats), max(beat.checkpoint for beat in beats)
        fault = ReportedFault.read(run) if exit.code == FAULT else None
        return cls(exit, step, checkpoint, run, fault)

    @property
    def resume_point(self) -> str:
        """Text that says where the next attempt resumes; empty if unknown."""
        if not self.run:
            return ""
        try:
            names = os.listdir(Path(self.run) / "checkpoints")
        except OSError:
            names = []
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        if newest:
            return f" from checkpoint {newest}"
        return " from the beginning: no checkpoint was sealed yet"


class AttemptHistory:
    """Failed attempts of a run.

    Args:
        program: the words before the verb that start the same processes again.
    """

    def __init__(self, program: str = ""):
        self._program = program or "jtrain"
        self._furthest, self._checkpoint, self._repeats = -1, -1, 0
        self.last: Attempt | None = None

    def add(self, attempt: Attempt) -> None:
        """Record an attempt that failed."""
        further = attempt.step > self._furthest or attempt.checkpoint > self._checkpoint
        self._repeats = 1 if further else self._repeats + 1
        self._furthest = max(self._furthest, attempt.step)
        self._checkpoint = max(self._checkpoint, attempt.checkpoint)
        self.last = attempt

    @property
    def repeats(self) -> int:
        """The last attempts in a row, none of which made more progress than their first."""
        return self._repeats

    @property
    def stuck(self) -> bool:
        """True if the run fails at the same place repeatedly."""
        return self._repeats >= ATTEMPTS

    def diagnosis(self) -> str:
        """Return the known facts about the place of the failure, and commands to inspect it."""
        attempt = self.last
        assert attempt is not None, "a failed attempt was added"
        fault, worker = attempt.fault, attempt.exit.worker
        step = fault.step if fault else self._furthest + 1
        batch = step - 1 if fault is None or fault.batch is None else fault.batch
        config = f"{attempt.run}/config.yaml"
        lines = [
            f"{self._repeats} attempts in a row ended no later than step {self._furthest}, without "
            f"a newer checkpoint: no further restart.",
            f"  fails in     step {step}, batch {batch} of the training data",
            f"  last loss    {_last_loss(attempt.run)}",
        ]
        if fault:
            lines.append(f"  why          {fault.why}")
        else:
            lines.append(f"  output       of process {worker.index if worker else 0}, below")
        if attempt.exit.stacks:
            lines.append(f"  stacks       {attempt.exit.stacks}")
        if attempt.run:
            lines += [
                f"  its rows     jtrain data show {config} --step {batch}",
                f"  NaN, shapes  jtrain run {config} --find-nan",
            ]
        if attempt.run and not fault:
            lines.append(f"  to resume    {self._program} run {config}")
        return "\n".join(lines) + "\n"


def _last_loss(run: str) -> str:
    """Return the last loss in metrics.jsonl, with its step."""
    for row in reversed(_rows(run, "metrics.jsonl")):
        if "loss" in row:
            return f"{row['loss']} at step {row.get('step')}"
    return "none was written"


def _rows(run: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of a run; none if it cannot be read."""
    try:
        return complete_rows(Path(run) / name) if run else []
    except CheckpointError:
        return []


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
