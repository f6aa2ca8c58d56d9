"""Members of a sweep side by side, each in a process on its own share of the machine."""

import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from jtrain.config.top import RUNS
from jtrain.errors import DONE, FAULT, STOPPED, ConfigError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.formatting import signal_name
from jtrain.io.regular_files import TooLargeError, open_regular, read_bytes
from jtrain.sweep.members import SweepMember

_POLL = 0.1  # seconds
MOST_OUTPUT = 1 << 24  # bytes of a member's output that are read


@dataclasses.dataclass(frozen=True)
class MachineShare:
    """Cores, and GPUs if there are any, that belong to no other share."""

    cores: frozenset[int]
    """Empty where the system cannot pin a process to cores."""
    gpus: Sequence[str] = ()

    def environment(self) -> Mapping[str, str]:
        """Return the environment of a process of this share; XLA's flags are unchanged."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Pin this thread to the share's cores in a `with` block; its children stay pinned."""
        if not self.cores:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def split_machine(jobs: int) -> list[MachineShare]:
    """Split the cores and GPUs that this process may use into `jobs` shares.

    Raises:
        ConfigError: if there are fewer cores or GPUs than jobs.
    """
    cores, gpus = _cores(), _gpus()
    for kind, available in (("cores", cores), ("GPUs", gpus)):
        if available and len(available) < jobs:
            raise ConfigError(
                f"--jobs {jobs}, and there are only {len(available)} {kind}: runs do not share "
                f"them. Write --jobs {len(available)}."
            )

    def part(items: list, index: int) -> list:
        return items[index * len(items) // jobs : (index + 1) * len(items) // jobs]

    return [MachineShare(frozenset(part(cores, i)), tuple(part(gpus, i))) for i in range(jobs)]


def _cores() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return []
    return sorted(os.sched_getaffinity(0))


def _gpus() -> list[str]:
    """Return the GPUs that JAX would use, by the driver: JAX would reserve their memory."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        return []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.split() if result.returncode == 0 else []


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


def run_members(
    config: Path,
    members: Sequence[SweepMember],
    shares: Sequence[MachineShare],
    *,
    lock: int,
    stopped: Callable[[], bool],
    begins: Callable[[SweepMember], None],
) -> Iterator[MemberExit]:
    """Run members in order, one on each share, and yield the end of each.

    Once `stopped` returns True, all are stopped and no more start. No process is left, however the
    generator exits.

    Args:
        lock: the file of `lock_sweep`; members hold the lock too.
    """
    waiting, free = list(members), list(shares)
    all_running: list[_Running] = []
    interrupted = False
    try:
        while True:
            if stopped() and not interrupted:
                interrupted = True
                for running in all_running:
                    running.process.send_signal(signal.SIGINT)  # it saves, and exits with 75
            while free and waiting and not stopped():
                member = waiting.pop(0)
                begins(member)
                all_running.append(_start(config, member, free.pop(0), lock))
            if not all_running:
                return
            for running in [x for x in all_running if x.process.poll() is not None]:
                all_running.remove(running)
                free.append(running.share)
                yield _exit(running, interrupted=interrupted)
            time.sleep(_POLL)
    finally:
        for running in all_running:
            running.process.kill()
            running.process.wait()


def _start(config: Path, member: SweepMember, share: MachineShare, lock: int) -> _Running:
    directory = member.directory.path
    with (
        _open_output(directory / "output.txt", "ab") as output,
        _open_output(directory / "errors.txt", "wb") as errors,
        share.pinned(),
    ):
        process = subprocess.Popen(
            member_command(config, member),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **share.environment()},
            start_new_session=True,  # Ctrl-C reaches it once, through the sweep
            pass_fds=[lock],
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
        locked = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # some file systems lock nothing
            locked = not isinstance(error, BlockingIOError)
        if not locked:
            raise ConfigError(
                f"a sweep of runs/{name} is running, or members of a killed sweep still are. "
                f"Wait for it, or end it; or choose another name: name={name}-2"
            )
        yield lock.fileno()


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
    message = "" if code in {DONE, STOPPED} else _message(running.member, code)
    return MemberExit(running.member, code, seconds, message)


def _message(member: SweepMember, code: int) -> str:
    """Return the reason of a failure, in the member's own words."""
    status = member.directory.facts()
    if status.get("status") == "failed" and code == FAULT:
        return status.get("why", "")
    if code < 0:
        name = signal_name(-code)
        return f"ended by {name}" + (", probably because memory was full" if code == -9 else "")
    try:
        read = read_bytes(member.directory.path / "errors.txt", most=MOST_OUTPUT)
        errors = read.decode(errors="replace").strip()
    except (OSError, TooLargeError):
        errors = ""
    return errors if code == 2 else errors.splitlines()[-1] if errors else f"exit code {code}"
