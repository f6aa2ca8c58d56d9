"""Supervisor: starts workers and servers, and starts those that died again."""

import collections
import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jtrain.distributed.cluster.cluster import CoordinatorAddress
from jtrain.errors import STOPPED, PeerError
from jtrain.server.client import Client, closing
from jtrain.server.coordinator import LATE, Coordinator
from jtrain.server.engines import Engine, Process, Role
from jtrain.server.listener import Listener, Registry
from jtrain.server.plan import Plan
from jtrain.server.process import ADDRESS, TOKEN
from jtrain.server.wire import with_huge_pages

_NAMES: dict[Role, str] = {"shard": "server", "worker": "worker"}


class Supervisor:
    """Processes of a run, and those that took their place."""

    def __init__(
        self, plan: Plan, engine: Engine, environ: Mapping[str, str], log: Callable[[str], None]
    ):
        self._plan, self._engine, self._log = plan, engine, log
        self.environ = environ
        """Variables that say where the run's own process is."""
        self.processes: dict[tuple[Role, int], Process] = {}
        """Processes by role and index."""
        self._restarts: collections.Counter[tuple[Role, int]] = collections.Counter()
        self._snapshot = -1
        self._short: float | None = None  # time since which there are too few workers

    def start(self, coordinator: Coordinator) -> None:
        """Start all processes."""
        for index in range(self._plan.server.shards):
            self._start("shard", index, coordinator)
        for index in range(self._engine.workers):
            self._start("worker", index, coordinator)

    def check(self, coordinator: Coordinator) -> None:
        """Start processes that died again, and tell the coordinator.

        Raises:
            PeerError: if one died too often since the last snapshot, with its last output, or too
                few workers are there for long.
        """
        if coordinator.snapshot.step != self._snapshot:
            self._restarts.clear()
            self._snapshot = coordinator.snapshot.step
        for role, index in coordinator.silent():
            self._log(f"{_NAMES[role]} {index} has not answered for long, and is killed")
            self.processes[role, index].kill()
        for (role, index), process in list(self.processes.items()):
            if process.end:
                self._replace(role, index, process, coordinator)
        self._check_number(coordinator)

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            process.kill()

    def _start(self, role: Role, index: int, coordinator: Coordinator) -> None:
        pages = with_huge_pages(os.environ) if role == "shard" else {}
        self.processes[role, index] = self._engine.start(role, index, {**self.environ, **pages})
        if role == "worker":
            coordinator.worker_started(index)

    def _replace(self, role: Role, index: int, process: Process, coordinator: Coordinator) -> None:
        name, end, server = f"{_NAMES[role]} {index}", process.end, self._plan.server
        process.kill()
        del self.processes[role, index]
        if role == "worker":
            coordinator.process_left(index, end)
            if end == f"exit code {STOPPED}":  # it was asked to leave
                if coordinator.missing():
                    self._log(f"worker {index} is started again, since the run needs it")
                    self._start(role, index, coordinator)
                return
        self._restarts[role, index] += 1
        if self._restarts[role, index] > server.restarts:
            error = PeerError(
                f"{process.output()}{name} ended ({end}) {self._restarts[role, index]} times since "
                f"step {coordinator.snapshot.step}, and parallel.restarts={server.restarts}. Its "
                f"last output is above."
            )
            if role == "shard" or coordinator.missing():
                raise error
            self._log(f"{error} The others go on without it.")
            return
        last = process.output().strip().rpartition("\n")[2]
        words = f": {last}" if last else ""
        self._log(f"{name} ended ({end}), and is started again{words}")
        self._start(role, index, coordinator)
        if role == "shard":
            coordinator.shard_left(index)

    def _check_number(self, coordinator: Coordinator) -> None:
        """Raise if there were too few workers for long."""
        missing, now = coordinator.missing(), time.monotonic()
        if not missing:
            self._short = None
            return
        self._short = self._short or now
        limit = LATE * self._plan.server.timeout
        if now > self._short + limit:
            key = "workers" if self._plan.server.needs_all_workers else "min_workers"
            raise PeerError(
                f"{len(coordinator.members)} workers were there for {limit:g} s, and {missing} "
                f"more are needed. Start them by jtrain work RUN, and resume the run by the same "
                f"command; or set parallel.{key} to a smaller number."
            )


@contextlib.contextmanager
def open_cluster(
    plan: Plan,
    engine: Engine,
    make: Callable[..., Coordinator],
    log: Callable[[str], None],
    *,
    record: Callable[[Mapping[str, Any]], None] = lambda row: None,
    registry: Registry | None = None,
) -> Iterator[tuple[Coordinator, Supervisor]]:
    """Start the processes of a run, in a `with` block.

    Args:
        record: takes a row for each worker that comes or goes.

    Raises:
        ConfigError: if the port is in use.
    """
    token, server = secrets.token_hex(16), plan.server
    options = {"token": token, **plan.connection}
    registry = registry or Registry(server.shards)
    with contextlib.ExitStack() as stack:
        # A server that died is started again meanwhile. A snapshot is large, and rare.
        calls = {"patience": server.start_timeout, "reuse": False, **options}
        shards = [
            Client(f"server {shard}", functools.partial(registry.locate, shard), **calls)
            for shard in range(server.shards)
        ]
        stack.enter_context(closing(shards))
        # The processes need the port of the listener, which needs the coordinator.
        supervise = lambda coordinator: supervisor.check(coordinator)
        coordinator = make(plan, shards, supervise=supervise, log=log, record=record)
        bind, host = engine.hosts(server)
        listener = Listener(
            lambda request: registry.handle(request) or coordinator.handle(request),
            port=server.port,
            host=bind,
            lost=coordinator.connection_lost,
            **options,
        )
        stack.enter_context(listener)
        coordinator.traffic = lambda: sum(
            size
            for name, size in dict(listener.by_name).items()
            if name not in ("register", "watch")
        )
        environ = {ADDRESS: str(CoordinatorAddress(host, listener.port)), TOKEN: token}
        supervisor = Supervisor(plan, engine, environ, log)
        stack.callback(supervisor.kill)
        stack.callback(registry.end)
        stack.callback(coordinator.end)
        supervisor.start(coordinator)
        yield coordinator, supervisor
