"""Starts a command in several processes, and ends them together."""

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from jtrain.cluster import cpu_devices
from jtrain.errors import ConfigError
from jtrain.launch.member import Member

DONE, STOPPED = 0, 75
POLL = 0.02  # seconds
FAREWELL = 1.0  # seconds that the others have to say what is wrong with them too, when one failed
LOOPBACK = "127.0.0.1"


def launch(command: Sequence[str], *, processes: int, devices: int = 0, port: int = 0) -> int:
    """Runs `command` in so many processes and gives the exit code, of the first that failed.

    They find one another on the loopback alone. The first one's words are shown as they come; those
    of another only if it fails, last of all. SIGINT and SIGTERM are handed on; the second ends all.

    Args:
        devices: CPU devices of each process; 0: as many as JAX makes.
        port: of the coordinator; 0: one that is free.

    Raises:
        ConfigError: if the port is in use.
    """
    where = f"{LOOPBACK}:{port or free_port()}"
    _refuse_used(port)
    _tell_of_name()
    members = []
    with contextlib.ExitStack() as stack:
        for index in range(processes):
            told = environment(os.environ, where, index, processes, devices)
            members.append(stack.enter_context(Member(index, command, told)))
        with handing_on(members) as interrupted:
            code = _watch(members, interrupted)
    return code


def environment(
    environ: Mapping[str, str], coordinator: str, index: int, processes: int, devices: int
) -> dict[str, str]:
    """What a process is told, over what this one was."""
    return {
        "JAX_PLATFORMS": "cpu",
        **environ,
        "JTRAIN_COORDINATOR": coordinator,
        "JTRAIN_PROCESSES": f"{processes}",
        "JTRAIN_PROCESS": f"{index}",
        **({cpu_devices.NUMBER: f"{devices}"} if devices else {}),
    }


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def handing_on(members: Sequence[Member]) -> Iterator[Callable[[], bool]]:
    """Within, signals go to all members; gives whether one came a second time."""
    came: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)
        for member in members:
            member.signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: len(came) > 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(members: Sequence[Member], interrupted: Callable[[], bool]) -> int:
    """Waits for all; ends them when one fails."""
    failed: Member | None = None
    while running := [member for member in members if member.code is None]:
        failed = failed or _first_failed(members)
        if failed:
            _wait(running, FAREWELL)
        if failed or interrupted():
            break
        time.sleep(POLL)
    for member in members:
        member.end()
    failed = failed or _first_failed(members)
    if failed is None:
        return max(member.code or DONE for member in members)
    sys.stderr.write(failed.last_words())
    sys.stderr.flush()
    return failed.exit_code


def _first_failed(members: Sequence[Member]) -> Member | None:
    ended = [member for member in members if member.code not in (None, DONE, STOPPED)]
    return min(ended, key=lambda member: member.ended, default=None)


def _wait(running: Sequence[Member], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(member.code is None for member in running):
        time.sleep(POLL)


def _refuse_used(port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise ConfigError(
                f"jtrain launch: --port {port} was asked for and cannot be had ({error.strerror}). "
                f"Leave --port out, and a free one is taken, such as {free_port()}."
            ) from None


def _tell_of_name() -> None:
    """Says so where more than the loopback will be listened at.

    Gloo, by which JAX's CPU processes exchange arrays, listens at the address that the machine's
    name has, and JAX has no setting for another.
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
