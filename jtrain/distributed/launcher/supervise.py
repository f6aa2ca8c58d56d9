"""Launch of a command in several processes, which are restarted together after a failure."""

import contextlib
import functools
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from jtrain.distributed.cluster.cluster import LAUNCHER, LOOPBACK, NUMBER
from jtrain.distributed.cluster.rendezvous import TOKEN
from jtrain.distributed.cluster.tls import throwaway_certificate
from jtrain.distributed.heartbeat import Beat
from jtrain.distributed.launcher.process_group import POLL, GroupExit, ProcessGroup, WorkerProcess
from jtrain.distributed.port import claimed_port
from jtrain.distributed.shutdown import REPEATS, ShutdownRequest, shutdown_signals
from jtrain.distributed.watchdog import Patience
from jtrain.errors import DONE, FAULT, MISTAKE, STOPPED, CheckpointError
from jtrain.io.jsonl import complete_rows
from jtrain.io.regular_files import read_json

ATTEMPTS = 3  # attempts that end at the same step: the failure is systematic
FIRST, MOST = 0.25, 60.0  # seconds before the first restart, and at most before a later one
LATE = 5.0  # seconds beyond the grace period after which a signalled group is killed
QUIT = 128 + signal.SIGQUIT  # the exit code that a shell gives to a process ended by SIGQUIT


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
    spent, repeats, furthest, checkpoint = 0, 0, -1, -1
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
            further = attempt.step > furthest or attempt.checkpoint > checkpoint
            repeats = 1 if further else repeats + 1
            furthest = max(furthest, attempt.step)
            checkpoint = max(checkpoint, attempt.checkpoint)
            guarded = attempt.fault if attempt.fault and attempt.fault.guarded else None
            if restarts and guarded:
                _write(
                    f"jtrain launch: the guard stopped the run at step {guarded.step}, where a "
                    f"restart would stop again: no restart.\n"
                )
            elif restarts and repeats >= ATTEMPTS:
                _write(attempt.diagnosis(repeats, furthest, program or "jtrain"))
            if exit.code == MISTAKE or guarded or repeats >= ATTEMPTS or spent == restarts:
                break
            spent += 1
            _write(
                f"jtrain launch: {attempt.reason}. Restarted ({spent} of {restarts})"
                f"{attempt.resume_point}.\n"
            )
            end = time.monotonic() + min(FIRST * 2 ** (repeats - 1), MOST)
            while time.monotonic() < end and not signals.time:
                time.sleep(POLL)
            if signals.time:
                return QUIT if signals.quit else STOPPED
    _write(_exit_note(exit))
    return exit.code


class ReportedFault(NamedTuple):
    """A fault that the run found in itself: the run ends with it after a restart, too."""

    step: int
    batch: int
    """The batch of that step, from 0."""
    why: str
    guarded: bool
    """True if a bad step ended the run, and its guard forbids another attempt."""

    @classmethod
    def read(cls, run: str) -> "ReportedFault | None":
        """Read the fault from the directory of a run; None unless the run itself reports one."""
        try:
            status = read_json(Path(run) / "run.json", inside=Path(run)) if run else {}
            if status["status"] != "failed" or not status["why"]:
                return None
            bad = next(reversed(_rows(run, "events.jsonl")), {})
            step = int(bad.get("step", status.get("step", 0)))
            batch = step - 1 if bad.get("batch") is None else int(bad["batch"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(step, batch, f"{status['why']}", bad.get("done") == "stopped")


class Attempt(NamedTuple):
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
    def reason(self) -> str:
        """The process that failed, how and after which step; or the one that is stuck."""
        worker = self.exit.worker
        if self.exit.hang or worker is None:
            return self.exit.hang or f"exit code {self.exit.code}"
        after = f"after step {self.step}" if self.step else "before the first step"
        return f"process {worker.index} ended ({worker.exit_reason}) {after}"

    @property
    def resume_point(self) -> str:
        """Text that says where the next attempt resumes; empty if unknown."""
        if not self.run:
            return ""
        names = []
        with contextlib.suppress(OSError):
            names = os.listdir(Path(self.run) / "checkpoints")
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        if newest:
            return f" from checkpoint {newest}"
        return " from the beginning: no checkpoint was sealed yet"

    def diagnosis(self, repeats: int, furthest: int, program: str) -> str:
        """Return the known facts about the place of the failure, and commands to inspect it."""
        fault, worker, config = self.fault, self.exit.worker, f"{self.run}/config.yaml"
        step, batch = (fault.step, fault.batch) if fault else (furthest + 1, furthest)
        losses = [row for row in _rows(self.run, "metrics.jsonl") if "loss" in row]
        loss = f"{losses[-1]['loss']} at step {losses[-1].get('step')}" if losses else ""
        lines = [
            f"{repeats} attempts in a row ended no later than step {furthest}, without a newer "
            f"checkpoint: no further restart.",
            f"  fails in     step {step}, batch {batch} of the training data",
            f"  last loss    {loss or 'none was written'}",
        ]
        if fault:
            lines.append(f"  why          {fault.why}")
        else:
            lines.append(f"  output       of process {worker.index if worker else 0}, below")
        if self.exit.stacks:
            lines.append(f"  stacks       {self.exit.stacks}")
        if self.run:
            lines += [
                f"  its rows     jtrain data show {config} --step {batch}",
                f"  NaN, shapes  jtrain run {config} --find-nan",
            ]
        if self.run and not fault:
            lines.append(f"  to resume    {program} run {config}")
        return "\n".join(lines) + "\n"


def _rows(run: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of a run; none if it cannot be read."""
    with contextlib.suppress(CheckpointError):
        return complete_rows(Path(run) / name) if run else []
    return []


class ReceivedSignals:
    """Signals that this process received."""

    def __init__(self):
        self.time = 0.0
        """The time of the first signal; 0 before."""
        self.second = ""
        """The name of the second signal, empty before; a repetition of the first does not count."""
        self.quit = False
        """True if SIGQUIT came: all are killed at once, with their stacks."""
        self._number = 0
        self._group: ProcessGroup | None = None
        self._request = ShutdownRequest()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Forward the first signal, and record a second one."""
        del frame
        which, name = self._request.signalled(), signal.Signals(number).name
        if which == "second":
            self.second = name
        if which == "first":
            self.time, self._number = time.monotonic(), number
            self.forward_to(self._group)
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
        if group is not None and self._number:
            group.signal(self._number)

    def handle_quit(self, number: int, frame: FrameType | None) -> None:
        """Record SIGQUIT."""
        del number, frame
        self.time, self.quit = self.time or time.monotonic(), True


def watch(group: ProcessGroup, signals: ReceivedSignals) -> GroupExit:
    """Watch a group until it ends; kill its last processes, and return its exit."""
    while (exit := group.poll()) is None:
        grace = max((beat.grace for beat in group.beats()), default=0.0) or 25.0
        if signals.quit:
            exit = group.hang_exit(QUIT)
        elif signals.second:
            _write(f"jtrain launch: second signal ({signals.second}): all are ended at once\n")
            exit = GroupExit(STOPPED)
        elif signals.time and time.monotonic() > signals.time + grace + LATE:
            _write(
                f"jtrain launch: not ended {grace:.0f} s after the signal; a run resumes from its "
                f"last checkpoint\n"
            )
            exit = GroupExit(STOPPED)
        if exit is not None:
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


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _exit_note(exit: GroupExit) -> str:
    output = exit.worker.hidden_output if exit.worker else ""
    if exit.hang:
        if "\n" in exit.stacks:  # the run has no directory for them
            return f"{output}{exit.stacks.strip()}\n{exit.hang}. All were ended.\n"
        stacks = f" The stacks of all: {exit.stacks}." if exit.stacks else ""
        return f"{output}{exit.hang}.{stacks} All were ended.\n"
    if exit.worker is None or exit.code in {DONE, STOPPED}:
        return ""
    if exit.same:
        return f"all processes failed ({exit.worker.exit_reason})\n"
    failure = f"process {exit.worker.index} failed ({exit.worker.exit_reason}), and all were ended"
    return f"{output}{failure}\n"


def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices: int = 0,
    restarts: int = 0,
    patience: Patience | None = None,
    program: str = "",
) -> int:
    """Run `command` in several processes; return the exit code of the first that failed.

    The processes connect on the loopback only, by a throw-away certificate where JAX takes one
    (`jtrain.distributed.cluster.tls`). The output of the first process is shown at once;
    the output of another only if it fails, at the very end. SIGINT, SIGTERM, SIGUSR1 and SIGHUP
    are forwarded; a second signal, two seconds later or more, ends all. SIGQUIT ends all at once,
    with their stacks.

    Args:
        devices: CPU devices of each process; 0: the default of JAX.
        restarts: number of restarts after a process failed or was stuck.
        patience: seconds in each phase after which a process counts as stuck.
        program: the words before the verb that start the same processes again.
    """
    if processes > 1:
        _warn_about_hostname()

    shared = {LAUNCHER: program} if program else {}

    @contextlib.contextmanager
    def begin() -> Iterator[ProcessGroup]:
        with claimed_port() as port:
            address = f"{LOOPBACK}:{port}"
            environs = [
                worker_environment(os.environ, address, index, processes, devices) | shared
                for index in range(processes)
            ]
            starts = [
                functools.partial(WorkerProcess, index, command, environ)
                for index, environ in enumerate(environs)
            ]
            with ProcessGroup(starts, patience=patience or Patience()) as group:
                yield group

    with contextlib.ExitStack() as stack:
        if processes > 1:
            shared |= stack.enter_context(throwaway_certificate(os.environ))
            shared[TOKEN] = os.environ.get(TOKEN) or secrets.token_hex(16)
        return supervise(begin, restarts=restarts, program=program)


def worker_environment(
    environ: Mapping[str, str], coordinator: str, index: int, processes: int, devices: int
) -> dict[str, str]:
    """Return the environment of a process; a single process keeps all devices."""
    return {
        **({"JAX_PLATFORMS": "cpu"} if processes > 1 else {}),
        **environ,
        "JTRAIN_COORDINATOR": coordinator,
        "JTRAIN_PROCESSES": f"{processes}",
        "JTRAIN_PROCESS": f"{index}",
        **({NUMBER: f"{devices}"} if devices else {}),
    }


def _warn_about_hostname() -> None:
    """Print a note if gloo will listen beyond the loopback.

    Gloo, by which JAX's CPU processes exchange arrays, listens at the address of the machine's
    name, and JAX has no setting for another address.
    """
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return
    if not ipaddress.ip_address(str(address).partition("%")[0]).is_loopback:
        sys.stderr.write(
            f"jtrain launch: the processes exchange arrays at {address}, the address of this "
            f"machine's name. For the loopback alone, put `{LOOPBACK} {name}` into /etc/hosts.\n"
        )
