"""Runs members side by side, each in a process with a share of the machine to itself."""

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

from jtrain.errors import DONE, FAULT, STOPPED, ConfigError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.regular_files import TooLargeError, open_regular, read_bytes
from jtrain.io.same_file import HeldFolder
from jtrain.sweep.machine import MachineShare
from jtrain.sweep.members import SweepMember

_POLL = 0.1  # seconds
MOST = 1 << 24  # bytes of what a member said that are read


@dataclasses.dataclass(frozen=True)
class MemberExit:
    """How a member ended."""

    member: SweepMember
    code: int
    seconds: float
    message: str = ""
    """What it said when it failed."""


@dataclasses.dataclass(frozen=True)
class _Running:
    member: SweepMember
    share: MachineShare
    process: subprocess.Popen
    begun: float


class MemberPool:
    """Starts members in the order they come, one on each share, until none is left.

    Args:
        config: the file that all of them are run from.
        shares: of the machine.
        lock: what `only_one` gives; members hold it too.
    """

    def __init__(self, config: Path, shares: Sequence[MachineShare], lock: Sequence[int]):
        self._config, self._free, self._lock = config, list(shares), lock
        self._running: list[_Running] = []

    def ends(
        self,
        members: Iterator[SweepMember],
        stopped: Callable[[], bool],
        begins: Callable[[SweepMember], None],
    ) -> Iterator[MemberExit]:
        """Each member when it has ended; once `stopped` says so, all are ended and none begins.

        However this generator is left, no process stays.
        """
        told = False
        try:
            while True:
                if stopped() and not told:
                    told = True
                    for one in self._running:
                        one.process.send_signal(signal.SIGINT)  # it keeps its state and says 75
                while self._free and not stopped() and (member := next(members, None)):
                    begins(member)
                    self._running.append(self._start(member, self._free.pop(0)))
                if not self._running:
                    return
                for one in [x for x in self._running if x.process.poll() is not None]:
                    self._running.remove(one)
                    self._free.append(one.share)
                    yield _end(one)
                time.sleep(_POLL)
        finally:
            for one in self._running:
                one.process.kill()
                one.process.wait()

    def _start(self, member: SweepMember, share: MachineShare) -> _Running:
        place = member.directory.path
        with (
            _written(place / "output.txt", "ab") as output,
            _written(place / "errors.txt", "wb") as errors,
            share.held(),
        ):
            process = subprocess.Popen(
                command_of(self._config, member),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, **share.environment()},
                start_new_session=True,  # Ctrl-C reaches it through us, once
                pass_fds=self._lock,
            )
        return _Running(member, share, process, time.monotonic())


def command_of(config: Path, member: SweepMember) -> list[str]:
    """What is run for a member: `jtrain run`, by this Python."""
    return [sys.executable, "-m", "jtrain", "run", str(config), *member.settings]


@contextlib.contextmanager
def only_one(name: str) -> Iterator[Sequence[int]]:
    """Holds the sweep of this name, so that no run of it is trained twice at a time.

    The lock is held by the members too: one whose sweep was killed keeps it until it ends. It is on
    the directory and on a file in it: nobody who removes the file lets another in.

    Raises:
        ConfigError: if the sweep, or a member of it, is running.
    """
    path = Path("runs") / name / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock, contextlib.closing(HeldFolder(path.parent)) as folder:
        try:
            for file in (lock.fileno(), folder.fileno()):
                _take(file)
        except BlockingIOError:
            raise ConfigError(
                f"a sweep of runs/{name} is running, or members of one that was killed still are. "
                f"Wait for it, or end it; or give this one a name of its own: name={name}-2"
            ) from None
        yield lock.fileno(), folder.fileno()


def _take(file: int) -> None:
    """Locks an open file, where the file system can; raises BlockingIOError if another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # NFS locks no directories, and others lock nothing
        pass


def _written(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    """A file for the words of a member.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_regular(path, mode)
    except OSError as error:
        raise ConfigError(
            f"{path} is to take the words of a run, and cannot be written ({error.strerror}). "
            f"{disk_advice(error, path).words}."
        ) from None


def _end(one: _Running) -> MemberExit:
    code, seconds = one.process.returncode, time.monotonic() - one.begun
    if code in {DONE, STOPPED}:
        return MemberExit(one.member, code, seconds)
    return MemberExit(one.member, code, seconds, _message(one.member, code))


def _read(path: Path) -> str:
    try:
        return read_bytes(path, most=MOST).decode(errors="replace").strip()
    except (OSError, TooLargeError):
        return ""


def _message(member: SweepMember, code: int) -> str:
    """Why it failed, in its own words."""
    stands = member.directory.stands()
    if stands.get("status") == "failed" and code == FAULT:
        return stands.get("why", "")
    errors = _read(member.directory.path / "errors.txt")
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (", which is what a full memory does" if code == -9 else "")
    return errors if code == 2 else errors.splitlines()[-1] if errors else f"exit code {code}"
