"""Engines: they start the processes of a run here or on Ray, or await those of a launcher."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from jtrain.distributed import ray_cluster
from jtrain.distributed.cluster.cluster import LOOPBACK, Cluster
from jtrain.distributed.cluster.rendezvous import bind_host
from jtrain.distributed.launcher.process_group import WorkerProcess
from jtrain.parallel import Server
from jtrain.server.listener import Registry

Role = Literal["worker", "shard"]
RAY_SERVER = {"CPU": 1}  # resources of a parameter server
POLL = 0.05  # seconds between two looks at a process
_OF_RAY = ("PYTHONBREAKPOINT", "SPT_NOENV")  # variables that Ray sets for its own workers


class Process(Protocol):
    """A process that an engine has started."""

    @property
    def end(self) -> str:
        """How it ended, `SIGKILL` or `exit code 70`; empty while it runs."""
        ...

    def output(self) -> str:
        """Return its last output."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


class Engine(Protocol):
    """What starts processes."""

    @property
    def workers(self) -> int:
        """Workers that it starts; others may join."""
        ...

    def hosts(self, server: Server) -> tuple[str, str]:
        """Return the address where the run's process listens (empty: all), and its name there."""
        ...

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> Process:
        """Start a process; `environ` says where the others are."""
        ...


class LocalProcess:
    """A process of this machine, which ends with this one."""

    def __init__(self, command: list[str], environ: Mapping[str, str]):
        # From 1 on: the output of process 0 is shown at once.
        self._process = WorkerProcess(1, command, environ)

    @property
    def end(self) -> str:
        """How it ended; empty while it runs."""
        return "" if self._process.code is None else self._process.exit_reason

    def output(self) -> str:
        """Return its last output."""
        if self.end:
            self._process.drain(1.0)
        return self._process.hidden_output

    def kill(self) -> None:
        """Kill it with its children."""
        with contextlib.suppress(OSError):
            self._process.__exit__()


class LocalEngine:
    """Processes of this machine."""

    def __init__(self, config: Path, workers: int):
        self._config, self.workers = config, workers

    def hosts(self, server: Server) -> tuple[str, str]:
        """Return the address in the config: the loopback by default."""
        return server.host, server.host

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> LocalProcess:
        """Start a process on the CPU, or on the platform that JAX_PLATFORMS names."""
        command = [sys.executable, *_program(role, index, self._config)]
        return LocalProcess(command, {"JAX_PLATFORMS": "cpu", **os.environ, **environ})


def _program(role: Role, index: int, config: Path) -> list[str]:
    return ["-m", "jtrain.server.process", role, f"{index}", str(config)]


class Attached:
    """A server that a launcher starts, known by the address that it reports."""

    def __init__(self, registry: Registry, shard: int):
        self._registry, self._shard = registry, shard
        self._address: Mapping[str, Any] | None = None

    @property
    def end(self) -> str:
        """How it ended: another has its place; empty while it is there or expected."""
        self._address = self._address or self._registry.find(self._shard)
        return "" if self._registry.find(self._shard) == self._address else "its place was taken"

    def output(self) -> str:
        """Return nothing: the launcher has its output."""
        return ""

    def kill(self) -> None:
        """Let it end, if it is there."""
        if not self.end:
            self._registry.dismiss(self._shard)


class ClusterEngine:
    """The tasks of a cluster: it starts none, and waits for those that are started again."""

    workers = 0  # they join

    def __init__(self, cluster: Cluster, registry: Registry):
        self._cluster, self._registry = cluster, registry

    def hosts(self, server: Server) -> tuple[str, str]:
        """Return the address of process 0."""
        del server
        address = self._cluster.coordinator
        assert address is not None, "several processes have a coordinator"
        return bind_host(address), address.host

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> Attached:
        """Expect a server."""
        del environ
        assert role == "shard", "workers join"
        return Attached(self._registry, index)


class NodeProcess:
    """Actor that runs a process on its node; the process ends with the actor."""

    def run(self, words: list[str], environ: Mapping[str, str], directory: str) -> tuple[str, str]:
        """Run the process to its end; return how it ended, and its last output."""
        if not Path(directory).is_dir():
            return f"{directory} does not exist on its node of the Ray cluster", ""
        os.chdir(directory)
        own = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
        # Number 1: the output of process 0 would be shown at once.
        with WorkerProcess(1, [sys.executable, *words], {**own, **environ}) as process:
            while process.code is None:
                time.sleep(POLL)
            process.drain(1.0)
            return process.exit_reason, process.hidden_output


class RayProcess:
    """A process on a node of the cluster, once there is room for it."""

    def __init__(
        self, ray: Any, words: list[str], environ: Mapping[str, str], resources: Mapping[str, float]
    ):
        own = dict(resources)
        memory = {"memory": own.pop("memory")} if "memory" in own else {}
        options = {"num_cpus": own.pop("CPU", 0), "num_gpus": own.pop("GPU", 0), **memory}
        remote = ray.remote(NodeProcess).options(**options, resources=own, max_restarts=0)
        self._ray, self._actor = ray, remote.remote()
        self._ended = self._actor.run.remote(words, dict(environ), os.getcwd())
        self._result = "", ""

    @property
    def end(self) -> str:
        """How it ended; empty while it runs or waits for room."""
        if not self._result[0]:
            try:
                if self._ray.wait([self._ended], timeout=0)[0]:
                    self._result = self._ray.get(self._ended)
            except Exception as found:  # Ray raises many; the actor is dead or was killed
                why = ray_cluster.first_line(f"{found}")
                self._result = f"its Ray actor died: {why}", ""
        return self._result[0]

    def output(self) -> str:
        """Return its last output; empty while it runs."""
        return self._result[1]

    def kill(self) -> None:
        """Kill it, and its actor."""
        with contextlib.suppress(Exception):  # the actor is gone, or the cluster is
            self._ray.kill(self._actor)


class RayEngine:
    """The nodes of a Ray cluster.

    A worker that the cluster has no room for joins when it has.

    Args:
        config: the file with every value of the run, which all nodes see.
    """

    def __init__(self, ray: Any, config: Path, workers: int, resources: Mapping[str, float]):
        self._ray, self._resources = ray, resources
        self._config, self.workers = config.absolute(), workers

    def hosts(self, server: Server) -> tuple[str, str]:
        """Return the loopback where all is on one node, else this node's address."""
        del server
        alone = sum(node["Alive"] for node in self._ray.nodes()) == 1
        host = LOOPBACK if alone else self._ray.util.get_node_ip_address()
        return host, host

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> RayProcess:
        """Start a process in an actor of its own."""
        resources = self._resources if role == "worker" else RAY_SERVER
        platforms = {} if resources.get("GPU") or resources.get("TPU") else {"JAX_PLATFORMS": "cpu"}
        chosen = {**platforms, **ray_cluster.forwarded(os.environ), **environ}
        return RayProcess(self._ray, _program(role, index, self._config), chosen, resources)


@contextlib.contextmanager
def open_ray_engine(config: Path, server: Server) -> Iterator[RayEngine]:
    """Connect to the cluster of RAY_ADDRESS, or start a private one, for a `with` block.

    Raises:
        UserError: if Ray is not installed, or no cluster answers.
        PeerError: if a private one does not start.
    """
    other = "set parallel.engine=local to train on this machine"
    ray_cluster.check_installed("parallel.engine=ray", other)
    where = ray_cluster.parse_address("", os.environ.get("RAY_ADDRESS", ""))
    typed = ray_cluster.parse_resources(server.resources)
    cpus = server.shards + server.workers * max(1, typed.get("CPU", 1))
    with contextlib.ExitStack() as stack:
        with _same_handlers():
            ray = stack.enter_context(ray_cluster.connected(where, cpus))
        needed = ray_cluster.process_resources(ray, typed)
        yield RayEngine(ray, config, server.workers, needed)


@contextlib.contextmanager
def _same_handlers() -> Iterator[None]:
    """Keep the handlers of signals: Ray's own would end the run without a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[Any, Any] = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
