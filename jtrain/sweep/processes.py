"""Processes of a sweep: members run side by side, each on its own share of the machine."""

import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from jtrain.config.top import RUNS
from jtrain.errors import DONE, FAULT, STOPPED, ConfigError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.formatting import signal_name
from jtrain.io.regular_files import TooLargeError, open_regular, read_bytes
from jtrain.sweep.machine import MachineShare
from jtrain.sweep.members import SweepMember

_POLL = 0.1  # seconds
MOST = 1 << 24  # bytes of a member's output that are read


@dataclasses.dataclass(frozen=True)
class MemberExit:
    """End of a member."""

    member: SweepMember
    code: int
    seconds: float
    message: str = ""
    """Its error message, if it failed."""


@dataclasses.dataclass(frozen=True)
class _Running:
    member: SweepMember
    share: MachineShare
    process: subprocess.Popen
    started: float


class MemberPool:
    """Pool that runs members in order, one on each share.

    Args:
        config: the config file of all members.
        shares: shares of the machine.
        lock: the file of `lock_sweep`; members hold the lock too.
    """

    def __init__(self, config: Path, shares: Sequence[MachineShare], lock: int):
        self._config, self._free, self._lock = config, list(shares), lock
        self._running: list[_Running] = []

    def ends(
        self,
        members: Iterator[SweepMember],
        stopped: Callable[[], bool],
        begins: Callable[[SweepMember], None],
    ) -> Iterator[MemberExit]:
        """Yield the end of each member; once `stopped` returns True, end all and start no more.

        No process is left, however the generator exits.
        """
        interrupted = False
        try:
            while True:
                if stopped() and not interrupted:
                    interrupted = True
                    for running in self._running:
                        running.process.send_signal(signal.SIGINT)  # it saves, and exits with 75
                while self._free and not stopped() and (member := next(members, None)):
                    begins(member)
                    self._running.append(self._start(member, self._free.pop(0)))
                if not self._running:
                    return
                for running in [x for x in self._running if x.process.poll() is not None]:
                    self._running.remove(running)
                    self._free.append(running.share)
                    yield _exit(running, interrupted=interrupted)
                time.sleep(_POLL)
        finally:
            for running in self._running:
                running.process.kill()
                running.process.wait()

    def _start(self, member: SweepMember, share: MachineShare) -> _Running:
        directory = member.directory.path
        with (
            _open_output(directory / "output.txt", "ab") as output,
            _open_output(directory / "errors.txt", "wb") as errors,
            share.pinned(),
        ):
            process = subprocess.Popen(
                member_command(self._config, member),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, **share.environment()},
                start_new_session=True,  # Ctrl-C reaches it once, through the sweep
                pass_fds=[self._lock],
            )
        return _Running(member, share, process, time.monotonic())


def member_command(config: Path, member: SweepMember) -> list[str]:
    """Return the command of a member: `jtrain run`, by this Python."""
    return [sys.executable, "-m", "jtrain", "run", str(config), *member.settings]


@contextlib.contextmanager
def lock_sweep(name: str) -> Iterator[int]:
    """Lock the sweep of this name, so that two processes never train the same run.

    The members hold the lock too: after a kill of the sweep a member keeps it until it ends.

    Raises:
        ConfigError: if the sweep, or a member of it, is running, or nothing can be written there.
    """
    path = RUNS / name / ".lock"
    with _open_output(path, "wb", "marks a running sweep") as lock:
        if not _lock(lock.fileno()):
            raise ConfigError(
                f"a sweep of runs/{name} is running, or members of a killed sweep still are. "
                f"Wait for it, or end it; or choose another name: name={name}-2"
            )
        yield lock.fileno()


def _lock(file: int) -> bool:
    """Lock an open file if the file system can; return False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some file systems lock nothing
        pass
    return True


def _open_output(
    path: Path, mode: Literal["ab", "wb"], use: str = "receives the output of a run"
) -> BinaryIO:
    """Open a file of a sweep to write; errors say what it is for.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_regular(path, mode)
    except OSError as error:
        raise ConfigError(
            f"{path} {use}, and cannot be written ({error.strerror}). "
            f"{disk_advice(error, path).words}."
        ) from None


def _exit(running: _Running, *, interrupted: bool) -> MemberExit:
    code, seconds = running.process.returncode, time.monotonic() - running.started
    if interrupted and code == -signal.SIGINT:  # in its first moments: nothing had begun
        code = STOPPED
    if code in {DONE, STOPPED}:
        return MemberExit(running.member, code, seconds)
    return MemberExit(running.member, code, seconds, _message(running.member, code))


def _read(path: Path) -> str:
    try:
        return read_bytes(path, most=MOST).decode(errors="replace").strip()
    except (OSError, TooLargeError):
        return ""


def _message(member: SweepMember, code: int) -> str:
    """Return the reason of a failure, in the member's own words."""
    status = member.directory.facts()
    if status.get("status") == "failed" and code == FAULT:
        return status.get("why", "")
    errors = _read(member.directory.path / "errors.txt")
    if code < 0:
        name = signal_name(-code)
        return f"ended by {name}" + (", probably because memory was full" if code == -9 else "")
    return errors if code == 2 else errors.splitlines()[-1] if errors else f"exit code {code}"
