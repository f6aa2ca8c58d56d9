"""Supervisor: starts workers and servers, and starts those that died again."""

import collections
import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from jtrain.distributed.launcher.port import claimed_port
from jtrain.errors import PeerError
from jtrain.server.client import Client, closing
from jtrain.server.coordinator import Coordinator
from jtrain.server.engine import Engine, Process, Role
from jtrain.server.listener import Listener
from jtrain.server.process import PORTS, TOKEN
from jtrain.server.server_plan import Plan

_NAMES: dict[Role, str] = {"shard": "server", "worker": "worker"}


class Supervisor:
    """Processes of a run, and those that took their place.

    Args:
        ports: of the coordinator and of each shard.
        log: takes a line for each restart.
    """

    def __init__(
        self, plan: Plan, engine: Engine, ports: list[int], token: str, log: Callable[[str], None]
    ):
        self._plan, self._engine, self._log = plan, engine, log
        self._environ = {PORTS: ",".join(map(str, ports)), TOKEN: token}
        self.processes: dict[tuple[Role, int], Process] = {}
        """Processes by role and index."""
        self._restarts: collections.Counter[tuple[Role, int]] = collections.Counter()
        self._snapshot = -1

    def start(self) -> None:
        """Start all processes."""
        for index in range(self._plan.server.shards):
            self._start("shard", index)
        for index in range(self._plan.server.workers):
            self._start("worker", index)

    def check(self, coordinator: Coordinator) -> None:
        """Start processes that died again, and tell the coordinator.

        Raises:
            PeerError: if one died too often since the last snapshot, with its last output.
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

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            process.kill()

    def _start(self, role: Role, index: int) -> None:
        self.processes[role, index] = self._engine.start(role, index, self._environ)

    def _replace(self, role: Role, index: int, process: Process, coordinator: Coordinator) -> None:
        name = _NAMES[role]
        process.kill()
        self._restarts[role, index] += 1
        if self._restarts[role, index] > self._plan.server.restarts:
            raise PeerError(
                f"{process.output()}{name} {index} ended ({process.end}) "
                f"{self._restarts[role, index]} times since step {coordinator.snapshot.step}, and "
                f"parallel.restarts={self._plan.server.restarts}. Its last output is above."
            )
        last = process.output().strip().rpartition("\n")[2]
        words = f": {last}" if last else ""
        self._log(f"{name} {index} ended ({process.end}), and is started again{words}")
        self._start(role, index)
        if role == "worker":
            coordinator.worker_left(index)
        else:
            coordinator.shard_left(index)


@contextlib.contextmanager
def open_cluster(
    plan: Plan,
    engine: Engine,
    make: Callable[..., Coordinator],
    log: Callable[[str], None],
) -> Iterator[tuple[Coordinator, Supervisor]]:
    """Start the processes of a run, in a `with` block.

    Args:
        make: the class of the coordinator.

    Raises:
        ConfigError: if the port is in use.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        numbers = [stack.enter_context(claimed_port()) for _ in range(plan.server.shards)]
        options: dict[str, Any] = {
            "token": token,
            "most": plan.most,
            "timeout": plan.server.timeout,
        }
        options["patience"] = 1.0  # then the supervisor looks whether they run
        names = [f"server {shard}" for shard in range(plan.server.shards)]
        shards = [Client(name, port, **options) for name, port in zip(names, numbers, strict=True)]
        stack.enter_context(closing(shards))
        supervisor: Supervisor | None = None

        def supervise(coordinator: Coordinator) -> None:
            assert supervisor is not None, "started below"
            supervisor.check(coordinator)

        coordinator = make(plan, shards, supervise=supervise, log=log)
        listener = stack.enter_context(
            Listener(coordinator.handle, token=token, most=plan.most, port=plan.server.port)
        )
        supervisor = Supervisor(plan, engine, [listener.port, *numbers], token, log)
        stack.callback(supervisor.kill)
        stack.callback(coordinator.end)
        supervisor.start()
        yield coordinator, supervisor
