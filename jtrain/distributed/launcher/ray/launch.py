"""Launch of a command in processes on the nodes of a Ray cluster that end together."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from jtrain.distributed.cluster.cluster import CoordinatorAddress
from jtrain.distributed.cluster.variables import LAUNCHER
from jtrain.distributed.heartbeat import Patience
from jtrain.distributed.launcher.launch import cluster_variables, warn_about_hostname
from jtrain.distributed.launcher.process_group import ProcessGroup
from jtrain.distributed.launcher.ray.cluster import (
    LOCAL,
    check_installed,
    cluster_nodes,
    connected,
    describe_cluster,
    parse_address,
)
from jtrain.distributed.launcher.ray.gang import Gang, no_room
from jtrain.distributed.launcher.ray.placement import (
    Resources,
    default_resources,
    describe_nodes,
    parse_resources,
    room,
)
from jtrain.distributed.launcher.supervise import ReceivedSignals, supervise
from jtrain.errors import UserError

# Variables of the driver that its processes get, by the beginnings of their names: those that
# change the numbers or the devices, and the keys of trackers and stores. The others are those of
# the node.
FORWARDED = (
    *("JAX_", "XLA_", "JTRAIN_", "LIBTPU_", "NCCL_", "PYTHON", "TF_CPP_"),
    *("WANDB_", "MLFLOW_", "HF_", "AWS_", "GOOGLE_", "GCS_"),
)


def launch_on_ray(
    words: Sequence[str],
    *,
    processes: tuple[int, int],
    address: str = "",
    resources: str = "",
    variables: str = "",
    wait: float = 60.0,
    devices: int = 0,
    port: int = 0,
    restarts: int = 0,
    patience: Patience | None = None,
    beats: bool = False,
    program: str = "",
) -> int:
    """Run a Python command in several processes; return the exit code of the first that failed.

    Each process is the child of a Ray actor, which ends with its driver. Signals, restarts, output
    and stuck processes are handled as by `launch`.

    Args:
        words: the command after the interpreter; each node has its own.
        processes: the least number of processes, and the number if the cluster has room.
        address: of the cluster, `auto` or `local`; empty: RAY_ADDRESS, or a private cluster.
        resources: of each process, `CPU=4,GPU=1`; empty: the default for the cluster.
        variables: names of further variables that the processes get, separated by commas.
        wait: seconds to wait for the room of all processes.
        devices: CPU devices of each process; 0: the default of JAX.
        port: port of the coordinator on the node of process 0; 0: a free one for each attempt.
        restarts: number of restarts after a process failed or was stuck.
        patience: seconds in each phase after which a process counts as stuck.
        beats: whether the command reports its phases from its start, as `jtrain run` does.
        program: the words before the verb that start the same processes again.

    Raises:
        UserError: if Ray is not installed, no cluster answers, or it cannot hold the processes.
        PeerError: if others use the cluster.
    """
    check_installed()
    where = parse_address(address, os.environ.get("RAY_ADDRESS", ""))
    typed = parse_resources(resources)
    chosen = forwarded(os.environ, variables)
    least, most = processes
    with connected(where, cpus=most * max(1.0, typed.get("CPU", 1.0))):
        needed = _needed(typed, devices)
        nodes = cluster_nodes()
        if where == LOCAL and (fits := room(nodes, needed)) < least:  # nothing will be added
            advice = f"--processes {fits}" if fits else "--resources CPU=1, for example"
            has = describe_nodes(nodes, needed)
            raise UserError(no_room(least, needed, fits, has, advice))
        sys.stderr.write(f"jtrain launch: {describe_cluster(where, needed)}\n")
        if where == LOCAL and most > 1:
            warn_about_hostname()
        if _on_cpu(needed):  # whatever JAX finds on a node
            chosen = {"JAX_PLATFORMS": "cpu", **chosen}

        @contextlib.contextmanager
        def begin(signals: ReceivedSignals) -> Iterator[ProcessGroup]:
            stopped = lambda: signals.time > 0
            shared = {LAUNCHER: program} if program else {}
            with Gang(least, most, needed, wait=wait, stopped=stopped) as gang:
                coordinator = str(CoordinatorAddress(*gang.coordinator(port)))
                environs = [
                    chosen | cluster_variables(coordinator, index, gang.size, devices) | shared
                    for index in range(gang.size)
                ]
                starts = gang.starts(words, environs)
                with ProcessGroup(starts, patience=patience or Patience(), beats=beats) as group:
                    yield group

        return supervise(begin, restarts=restarts, program=program)


def forwarded(environ: Mapping[str, str], names: str = "") -> dict[str, str]:
    """Return the variables of the driver that its processes get.

    Args:
        environ: the environment of the driver.
        names: names beside those of `FORWARDED`, separated by commas.

    Raises:
        UserError: if a named variable is not set.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if missing := [name for name in chosen if name not in environ]:
        raise UserError(
            f"jtrain launch: --env names {missing[0]}, which is not set here. Type "
            f"export {missing[0]}=VALUE first, or leave it out"
        )
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED) or name in chosen
    }


def _needed(typed: Resources, devices: int) -> Resources:
    """Return the resources of a process.

    Raises:
        UserError: if CPU devices are asked for beside accelerators.
    """
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or devices > 0
    needed = {"CPU": 1.0, **typed} if typed else default_resources(cluster_nodes(), on_cpu=on_cpu)
    if devices and not _on_cpu(needed):
        raise UserError(
            f"jtrain launch: --devices {devices} is a number of CPU devices, and --resources gives "
            f"accelerators; leave one of them out: --resources GPU=2 is two GPUs for each process"
        )
    return needed


def _on_cpu(needed: Resources) -> bool:
    return not needed.get("GPU") and not needed.get("TPU")
