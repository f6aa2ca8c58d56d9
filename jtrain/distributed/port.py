"""Ports of the loopback, each claimed by one launch of this machine."""

import contextlib
import errno
import random
import socket
import sys
from collections.abc import Iterator

from jtrain.distributed.cluster.cluster import LOOPBACK

# Free ports: below those that the kernel gives to sockets without a port of their own, so that none
# of them has it when a process listens there, seconds later. Kubernetes has those from 30,000 on.
LOWEST, HIGHEST = 20_000, 29_999
_given: set[int] = set()  # ports that this process has found free


@contextlib.contextmanager
def claimed_port() -> Iterator[int]:
    """Claim a free port for the processes of a launch.

    The port itself stays free for process 0 and then for JAX, which bind it in turn. So the lock is
    on the name of the port: two launches that begin at the same moment never claim the same port.
    On Linux it is a socket in the namespace of the ports themselves, for all users; elsewhere there
    is none.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            port = free_port()
            try:
                if sys.platform == "linux":
                    lock.bind(f"\0jtrain-launch-{port}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue  # another launch has it
            yield port
            return


def free_port() -> int:
    """Return a port of the loopback at which no program listens, another one at each call."""
    while True:
        port = random.SystemRandom().randint(LOWEST, HIGHEST)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


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
