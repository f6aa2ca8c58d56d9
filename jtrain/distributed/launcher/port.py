"""A port of the loopback that one launch of this machine has, and no other."""

import contextlib
import fcntl
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from jtrain.errors import ConfigError

LOOPBACK = "127.0.0.1"
TRIES = 100


@contextlib.contextmanager
def claimed_port(port: int = 0) -> Iterator[int]:
    """Hold a port for the processes of a launch: `port`, or a free one where it is 0.

    The port itself stays free for process 0 and then for JAX, which take it in turn. So it is not
    the port that is held but its name, from before anybody looks whether it is free: two launches
    that begin at one moment never both have it.

    Raises:
        ConfigError: if another launch holds it, or another program listens there.
    """
    with contextlib.ExitStack() as stack:
        number = port or free_port()
        for _ in range(TRIES):
            if holder := _claim(number):
                stack.enter_context(holder)
                break
            if port:
                raise _refused(port, "another jtrain launch has it")
            number = free_port()
        else:
            raise _refused(number, f"as {TRIES} others are held by other launches")
        if port:
            _refuse_used(port)
        yield number


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


def _claim(port: int) -> AbstractContextManager | None:
    """Return what holds the name of a port until this process is gone; None if another does.

    On Linux a socket in the namespace of the ports themselves, whoever the users are; elsewhere a
    lock on a file, among the launches of a user.
    """
    if sys.platform == "linux":
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0jtrain-launch-{port}")
            return held
        except OSError:
            held.close()
            return None
    file = (Path(tempfile.gettempdir()) / f"jtrain-launch-{os.getuid()}-{port}").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError:
        file.close()
        return None


def _refuse_used(port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            raise _refused(port, getattr(error, "strerror", "") or f"{error}") from None


def _refused(port: int, why: str) -> ConfigError:
    return ConfigError(
        f"jtrain launch: --port {port} was asked for and cannot be had ({why}). Leave --port out, "
        f"and a free one is taken, such as {free_port()}."
    )
