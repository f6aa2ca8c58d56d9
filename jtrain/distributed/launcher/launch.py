"""Launch of a command in several processes that end together."""

import contextlib
import functools
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from jtrain.distributed.cluster.cluster import LAUNCHER, LOOPBACK, NUMBER
from jtrain.distributed.cluster.rendezvous import TOKEN
from jtrain.distributed.cluster.tls import throwaway_certificate
from jtrain.distributed.launcher.process_group import ProcessGroup
from jtrain.distributed.launcher.supervise import supervise
from jtrain.distributed.launcher.worker import WorkerProcess
from jtrain.distributed.port import claimed_port
from jtrain.distributed.watchdog import Patience


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
