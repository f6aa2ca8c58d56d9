"""Engines: they start the processes of a run on this machine, or await those of a launcher."""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from jtrain.distributed.cluster.cluster import Cluster
from jtrain.distributed.cluster.rendezvous import bind_host
from jtrain.distributed.launcher.worker import WorkerProcess
from jtrain.parallel import Server
from jtrain.server.registry import Registry

Role = Literal["worker", "shard"]


class Listening(NamedTuple):
    """Where the run's own process listens."""

    bind: str
    """Address of this machine; empty: all."""
    host: str
    """Name or address by which the others reach it."""
    port: int
    """0: a free one."""


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

    def listening(self, server: Server) -> Listening:
        """Return where the run's own process listens."""
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
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

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
    """Processes of this machine.

    Args:
        config: the file with every value of the run.
        workers: to start.
    """

    def __init__(self, config: Path, workers: int):
        self._config, self.workers = config, workers

    def listening(self, server: Server) -> Listening:
        """Return the address in the config: the loopback by default."""
        return Listening(server.host, server.host, server.port)

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> LocalProcess:
        """Start a process on the CPU, or on the platform that JAX_PLATFORMS names."""
        command = [sys.executable, *program(role, index, self._config)]
        return LocalProcess(command, {"JAX_PLATFORMS": "cpu", **os.environ, **environ})


def program(role: Role, index: int, config: Path) -> list[str]:
    """Return the words after the interpreter that start a process."""
    return ["-m", "jtrain.server.process", role, f"{index}", str(config)]


class Attached:
    """A server that a launcher has started, known by its connection."""

    def __init__(self, registry: Registry, shard: int):
        self._registry, self._shard = registry, shard

    @property
    def end(self) -> str:
        """How it ended; empty while it is there or expected."""
        return "its connection broke" if self._registry.is_lost(self._shard) else ""

    def output(self) -> str:
        """Return nothing: the launcher has its output."""
        return ""

    def kill(self) -> None:
        """Let it end: it is told that another has its place."""
        self._registry.lose(self._shard)


class ClusterEngine:
    """The tasks of a cluster: it starts none, and waits for those that are started again.

    Args:
        cluster: whose process 0 is the run's own.
        registry: to which the servers report.
    """

    workers = 0  # they join

    def __init__(self, cluster: Cluster, registry: Registry):
        self._cluster, self._registry = cluster, registry

    def listening(self, server: Server) -> Listening:
        """Return the address of process 0, with the port in the config."""
        address = self._cluster.coordinator
        assert address is not None, "several processes have a coordinator"
        return Listening(bind_host(address), address.host, server.port)

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> Attached:
        """Expect a server."""
        del environ
        assert role == "shard", "workers join"
        return Attached(self._registry, index)
