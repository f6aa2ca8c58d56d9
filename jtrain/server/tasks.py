"""Tasks of a launcher as the processes of a run: the first is its own, then servers, then workers.

All of them are started by the same command, under Slurm by `srun`.
"""

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from jtrain.config.top import RUNS
from jtrain.distributed.cluster import Cluster, detect
from jtrain.errors import ConfigError
from jtrain.parallel import Server
from jtrain.server.processes.join import hold_shard, join
from jtrain.server.processes.process import leave_on_signals
from jtrain.train.compilation_cache import enable_compilation_cache
from jtrain.train.experiment import RunConfig


class Task(NamedTuple):
    """Part of a process in a run."""

    role: Literal["run", "shard", "worker"]
    number: int


def find_task(server: Server, cluster: Cluster) -> Task:
    """Return the part of this process of a cluster.

    Raises:
        ConfigError: if there are too few processes, or not the servers of the config.
    """
    shards, workers = server.shards, cluster.processes - 1 - server.shards
    if cluster.servers and cluster.servers != shards:
        raise ConfigError(
            f"{cluster.kind} has {cluster.servers} servers, and the config parallel.shards="
            f"{shards}. Set parallel.shards={cluster.servers}."
        )
    needed = server.needed_workers
    if workers < needed:
        raise ConfigError(
            f"{cluster.kind} started {cluster.processes} processes ({cluster.variables}): one for "
            f"the run itself and parallel.shards={shards} servers leave {max(workers, 0)} workers, "
            f"and {needed} are needed. Start {1 + shards + needed} processes, or set "
            f"parallel.workers and parallel.shards to smaller numbers."
        )
    if cluster.index == 0:
        return Task("run", 0)
    if cluster.index <= shards:
        return Task("shard", cluster.index - 1)
    return Task("worker", cluster.index - 1 - shards)


def take_part(
    config: RunConfig, environ: Mapping[str, str], log: Callable[[str], None]
) -> int | None:
    """Work as a server or a worker, where a launcher has started this process as one.

    Returns:
        The exit code; None if this process is the run's own.

    Raises:
        ConfigError: if a launcher has started several processes, and the run starts its own.
    """
    server = config.parallel
    if not isinstance(server, Server):
        return None
    cluster = detect(environ)
    if server.engine != "cluster":
        if cluster.processes > 1:
            raise ConfigError(
                f"{cluster.kind} started {cluster.processes} processes ({cluster.variables}), and "
                f"parallel.engine={server.engine} starts processes of its own. Set "
                f"parallel.engine=cluster to train in those of {cluster.kind}; or start one."
            )
        return None
    if cluster.processes == 1:
        raise ConfigError(
            f"parallel.engine=cluster needs the processes of a launcher, such as srun, and this is "
            f"one by itself. Start {1 + server.shards + server.workers} of them, or set "
            f"parallel.engine=local."
        )
    task = find_task(server, cluster)
    if task.role == "run":
        return None
    directory, wait = RUNS / (config.name or config.experiment), server.start_timeout
    enable_compilation_cache()
    if task.role == "shard":
        # The run needs it for its last checkpoint, and ends it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return hold_shard(directory, task.number, wait=wait, log=log)
    leaving = threading.Event()
    leave_on_signals(leaving)
    return join(directory, wait=wait, leaving=leaving, log=log)
