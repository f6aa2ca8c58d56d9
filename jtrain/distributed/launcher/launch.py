"""Starts a command in several processes, and ends them together."""

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from jtrain.distributed.cluster import cpu_devices
from jtrain.distributed.cluster.command_line import LAUNCHER
from jtrain.distributed.heartbeat import Patience
from jtrain.distributed.heartbeat.fault import Fault
from jtrain.distributed.launcher.port import LOOPBACK, claimed_port
from jtrain.distributed.launcher.process_group import ProcessGroup
from jtrain.distributed.launcher.rehearsal import FaultRehearsal
from jtrain.distributed.launcher.supervise import supervise


def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices: int = 0,
    port: int = 0,
    restarts: int = 0,
    patience: Patience | None = None,
    beats: bool = False,
    faults: Sequence[Fault] = (),
    typed: str = "",
) -> int:
    """Runs `command` in so many processes and gives the exit code, of the first that failed.

    They find one another on the loopback alone. The first one's words are shown as they come; those
    of another only if it fails, last of all. SIGINT, SIGTERM, SIGUSR1 and SIGHUP are handed on; a
    second one, from two seconds on, ends all. SIGQUIT ends all at once, with their stacks.

    Args:
        devices: CPU devices of each process; 0: as many as JAX makes.
        port: of the coordinator; 0: one that is free, another one at each beginning.
        restarts: how often all are begun again after one failed or was stuck.
        patience: seconds in each phase after which a process is taken for stuck.
        faults: what is done to them on purpose.
        beats: whether what is run tells its phases from its start, as `jtrain run` does.
        typed: what a person types before the verb to have the same processes again.

    Raises:
        ConfigError: if the port is in use, or another launch has it.
    """
    if processes > 1:
        _tell_of_name()

    chaos = FaultRehearsal(faults)

    @contextlib.contextmanager
    def begin() -> Iterator[ProcessGroup]:
        shared = chaos.environment() | ({LAUNCHER: typed} if typed else {})
        with contextlib.nullcontext(port) if port else claimed_port() as number:
            where = f"{LOOPBACK}:{number}"
            told = [
                environment(os.environ, where, index, processes, devices) | shared
                for index in range(processes)
            ]
            with ProcessGroup(command, told, patience=patience or Patience(), beats=beats) as gang:
                yield gang

    with claimed_port(port) if port else contextlib.nullcontext():
        return supervise(begin, restarts=restarts, chaos=chaos, typed=typed)


def environment(
    environ: Mapping[str, str], coordinator: str, index: int, processes: int, devices: int
) -> dict[str, str]:
    """What a process is told, over what this one was; one that is alone has all devices."""
    return {
        **({"JAX_PLATFORMS": "cpu"} if processes > 1 else {}),
        **environ,
        "JTRAIN_COORDINATOR": coordinator,
        "JTRAIN_PROCESSES": f"{processes}",
        "JTRAIN_PROCESS": f"{index}",
        **({cpu_devices.NUMBER: f"{devices}"} if devices else {}),
    }


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
