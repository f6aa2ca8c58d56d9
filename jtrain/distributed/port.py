"""Ports of the loopback, each claimed by one launch of this machine."""

import contextlib
import random
import socket
import sys
from collections.abc import Iterator

from jtrain.distributed.cluster.cluster import LOOPBACK
from jtrain.errors import ConfigError

TRIES = 100
# Free ports: below those that the kernel gives to sockets without a port of their own, so that none
# of them has it when a process listens there, seconds later. Kubernetes has those from 30,000 on.
LOWEST, HIGHEST = 20_000, 29_999
_given: set[int] = set()  # ports that this process has found free


@contextlib.contextmanager
def claimed_port(port: int = 0) -> Iterator[int]:
    """Claim a port for the processes of a launch: `port`, or a free one if it is 0.

    The port itself stays free for process 0 and then for JAX, which bind it in turn. So the lock is
    on the name of the port, taken before any check that the port is free: two launches that begin
    at the same moment never claim the same port. On Linux it is a socket in the namespace of the
    ports themselves, for all users; elsewhere there is none.

    Raises:
        ConfigError: if another launch has claimed it, or another program listens there.
    """
    number = port
    with socket.socket(socket.AF_UNIX) as lock:
        for _ in range(1 if port else TRIES):
            number = port or free_port()
            try:
                if sys.platform == "linux":
                    lock.bind(f"\0jtrain-launch-{number}")
                break
            except OSError:
                continue
        else:
            raise _error(number, "another jtrain launch has it")
        if port and (why := _why_unavailable(port)):
            holder, _ = find_port_holder(port)
            raise _error(port, f"{holder} listens there" if holder else why)
        yield number


def free_port() -> int:
    """Return a port of the loopback at which no program listens, another one at each call."""
    while True:
        port = random.SystemRandom().randint(LOWEST, HIGHEST)
        if port not in _given and not _why_unavailable(port):
            _given.add(port)
            return port


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


def find_port_holder(port: int) -> tuple[str, str]:
    """Return the program that listens at a port, `process 4711 (python3)`, and how to stop it.

    Both are empty if it is unknown; the second is if another user started it.
    """
    import psutil  # here: `jtrain doctor` runs where no package can be imported

    with contextlib.suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and getattr(each.laddr, "port", 0) == port:
                if not each.pid:
                    return "a process of another user", ""
                return f"process {each.pid} ({psutil.Process(each.pid).name()})", f"kill {each.pid}"
    return "", ""
