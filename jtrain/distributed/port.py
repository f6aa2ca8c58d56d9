"""Ports of the loopback, each claimed by one launch of this machine."""

import contextlib
import fcntl
import os
import random
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from jtrain.distributed.cluster.cluster import LOOPBACK
from jtrain.errors import ConfigError

TRIES = 100
LOWEST, HIGHEST = 20_000, 29_999  # of free ports; Kubernetes has those from 30,000 on
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of Linux
_given: set[int] = set()  # ports that this process has found free


@contextlib.contextmanager
def claimed_port(port: int = 0) -> Iterator[int]:
    """Claim a port for the processes of a launch: `port`, or a free one if it is 0.

    The port itself stays free for process 0 and then for JAX, which bind it in turn. So the lock is
    on the name of the port, taken before any check that the port is free: two launches that begin
    at the same moment never claim the same port.

    Raises:
        ConfigError: if another launch has claimed it, or another program listens there.
    """
    with contextlib.ExitStack() as stack:
        number = port or free_port()
        for _ in range(TRIES):
            if lock := _claim(number):
                stack.enter_context(lock)
                break
            if port:
                raise _error(port, "another jtrain launch has it")
            number = free_port()
        else:
            raise _error(number, f"{TRIES} others are claimed by other launches")
        if port:
            _check_unused(port)
        yield number


def free_port() -> int:
    """Return a port of the loopback at which no program listens, another one at each call.

    It is below those that the kernel gives to sockets without a port of their own, so that none of
    them has it when a process that starts meanwhile listens there, seconds later.
    """
    highest = min(HIGHEST, _lowest_ephemeral() - 1)
    for _ in range(TRIES if highest > LOWEST else 0):
        port = random.SystemRandom().randint(LOWEST, highest)
        if port not in _given and not _why_unavailable(port):
            _given.add(port)
            return port
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


def _lowest_ephemeral() -> int:
    try:
        return int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 49_152  # by IANA, and on macOS


def _claim(port: int) -> AbstractContextManager | None:
    """Return a lock on the name of a port, held until this process ends; None if it is taken.

    On Linux the lock is a socket in the namespace of the ports themselves, for all users; elsewhere
    it is a lock on a file, among the launches of a user.
    """
    if sys.platform == "linux":
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0jtrain-launch-{port}")
            return lock
        except OSError:
            lock.close()
            return None
    file = (Path(tempfile.gettempdir()) / f"jtrain-launch-{os.getuid()}-{port}").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError:
        file.close()
        return None


def _check_unused(port: int) -> None:
    if why := _why_unavailable(port):
        holder = find_port_holder(port)
        raise _error(port, f"{holder} listens there" if holder else why)


def _why_unavailable(port: int) -> str:
    """Return why no program can listen at a port; empty if one can."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", "") or f"{error}"
    return ""


def _error(port: int, why: str) -> ConfigError:
    return ConfigError(
        f"jtrain launch: --port {port} is not available ({why}). Leave --port out to use a free "
        f"one, such as {free_port()}."
    )


LISTENS = "0A"  # state of a socket, in hexadecimal: TCP_LISTEN of include/net/tcp_states.h


def find_port_holder(port: int, root: Path = Path("/proc")) -> str:
    """Return the program that listens at a port: `process 4711 (python3)`; "" if unknown.

    The kernel shows the sockets of all, and the files of a process only to its own user.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port, root)}
    for pid in sorted(filter(str.isdigit, _names(root)), key=int) if sockets else ():
        for file in _names(root / pid / "fd"):
            try:
                found = os.readlink(root / pid / "fd" / file) in sockets
                name = (root / pid / "comm").read_text().strip() if found else ""
            except (OSError, UnicodeDecodeError):
                continue
            if found:
                return f"process {pid} ({name})"
    return "a process of another user" if sockets else ""


def _listening(port: int, root: Path) -> list[str]:
    """Return the inodes of the sockets that listen at a port."""
    inodes = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (root / "self/net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in map(str.split, lines):  # local address, remote one, state ... inode: proc(5)
            if row[1].endswith(f":{port:04X}") and row[3] == LISTENS:
                inodes.append(row[9])
    return inodes


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def stop_advice(holder: str) -> str:
    """Return how to stop a program that `find_port_holder` found: `kill 4711`; "" if unknown."""
    found = re.match(r"process (\d+) ", holder)
    return f"kill {found[1]}" if found else ""
