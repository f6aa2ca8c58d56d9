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
from jtrain.server.listener import Listener
from jtrain.server.plan import Plan
from jtrain.server.process import ADDRESS, TOKEN
from jtrain.server.registry import Registry
from jtrain.server.wire import Message, with_huge_pages

_NAMES: dict[Role, str] = {"shard": "server", "worker": "worker"}


class Supervisor:
    """Processes of a run, and those that took their place.

    Args:
        environ: variables that say where the run's own process is.
        log: takes a line for each restart.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        registry: Registry,
        environ: Mapping[str, str],
        log: Callable[[str], None],
    ):
        self._plan, self._engine, self._registry, self._log = plan, engine, registry, log
        self.environ = environ
        """Variables that say where the run's own process is."""
        self.processes: dict[tuple[Role, int], Process] = {}
        """Processes by role and index."""
        self._restarts: collections.Counter[tuple[Role, int]] = collections.Counter()
        self._snapshot = -1
        self._resting: set[int] = set()  # workers that have left, and may be needed again
        self._short: float | None = None  # time since which there are too few workers

    def start(self, coordinator: Coordinator) -> None:
        """Start all processes."""
        for index in range(self._plan.server.shards):
            self._start("shard", index)
        for index in range(self._engine.workers):
            self._start_worker(index, coordinator)

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
            name = _NAMES[role]
            self._log(f"{name} {index} has not answered for long, and is killed")
            self.processes[role, index].kill()
        for (role, index), process in list(self.processes.items()):
            if process.end:
                self._replace(role, index, process, coordinator)
        self._check_number(coordinator)

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            process.kill()

    def _start(self, role: Role, index: int) -> None:
        pages = with_huge_pages(os.environ) if role == "shard" else {}
        self.processes[role, index] = self._engine.start(role, index, {**self.environ, **pages})

    def _start_worker(self, index: int, coordinator: Coordinator) -> None:
        coordinator.members.reserved.add(index)
        self._resting.discard(index)
        self._start("worker", index)
        coordinator.worker_started(index)

    def _check_number(self, coordinator: Coordinator) -> None:
        """Start a worker that has left again, or wait for others, while there are too few."""
        missing = coordinator.missing()
        if not missing:
            self._short = None
            return
        running = [role for role, _ in self.processes].count("worker")
        if self._resting and running < missing + coordinator.members.processes:
            index = min(self._resting)
            self._log(f"worker {index} is started again, since the run needs it")
            self._start_worker(index, coordinator)
        now = time.monotonic()
        if self._short is None:
            self._short = now
        limit = LATE * self._plan.server.timeout
        if now > self._short + limit:
            key = "workers" if self._plan.server.needs_all_workers else "min_workers"
            raise PeerError(
                f"{len(coordinator.members)} workers were there for {limit:g} s, and "
                f"{missing} more are needed. Start them by jtrain work RUN, and resume the run by "
                f"the same command; or set parallel.{key} to a smaller number."
            )

    def _replace(self, role: Role, index: int, process: Process, coordinator: Coordinator) -> None:
        name = _NAMES[role]
        process.kill()
        if role == "worker":
            coordinator.process_left(index, process.end)
            if process.end == f"exit code {STOPPED}":  # it has left; another may have its number
                del self.processes[role, index]
                coordinator.members.reserved.discard(index)
                self._resting.add(index)
                return
        self._restarts[role, index] += 1
        if self._restarts[role, index] > self._plan.server.restarts:
            error = PeerError(
                f"{process.output()}{name} {index} ended ({process.end}) "
                f"{self._restarts[role, index]} times since step {coordinator.snapshot.step}, and "
                f"parallel.restarts={self._plan.server.restarts}. Its last output is above."
            )
            if role == "shard" or coordinator.missing():
                raise error
            self._log(f"{error} The others go on without it.")
            del self.processes[role, index]
            coordinator.members.reserved.discard(index)
            return
        last = process.output().strip().rpartition("\n")[2]
        words = f": {last}" if last else ""
        self._log(f"{name} {index} ended ({process.end}), and is started again{words}")
        if role == "shard":
            self._registry.forget(index)
        self._start(role, index)
        if role == "worker":
            coordinator.worker_started(index)
        else:
            coordinator.shard_left(index)


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
        make: the class of the coordinator.
        record: takes a row for each worker that comes or goes.
        registry: takes the addresses of the servers.

    Raises:
        ConfigError: if the port is in use.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {
            "token": token,
            "most": plan.most,
            "timeout": plan.server.timeout,
        }
        # After a second the supervisor looks whether they run. A snapshot is large, and rare.
        calls = {"patience": 1.0, "reuse": False, **options}
        registry = registry or Registry(plan.server.shards)
        shards = [
            Client(f"server {shard}", functools.partial(registry.locate, shard), **calls)
            for shard in range(plan.server.shards)
        ]
        stack.enter_context(closing(shards))
        supervisor: Supervisor | None = None

        def supervise(coordinator: Coordinator) -> None:
            assert supervisor is not None, "started below"
            supervisor.check(coordinator)

        coordinator = make(plan, shards, supervise=supervise, log=log, record=record)

        def lost(request: Message) -> None:
            registry.lost(request)
            coordinator.connection_lost(request)

        where = engine.listening(plan.server)
        listener = stack.enter_context(
            Listener(
                lambda request: registry.handle(request) or coordinator.handle(request),
                port=where.port,
                host=where.bind,
                lost=lost,
                **options,
            )
        )
        coordinator.traffic = lambda: listener.traffic("register", "watch")
        environ = {ADDRESS: str(CoordinatorAddress(where.host, listener.port)), TOKEN: token}
        supervisor = Supervisor(plan, engine, registry, environ, log)
        stack.callback(supervisor.kill)
        stack.callback(registry.end)
        stack.callback(coordinator.end)
        supervisor.start(coordinator)
        yield coordinator, supervisor
