"""Engine of Ray: each server and worker is the child of an actor, and ends with it."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jtrain.distributed.launcher.port import LOOPBACK
from jtrain.distributed.launcher.ray.cluster import (
    check_installed,
    cluster_nodes,
    connected,
    import_ray,
    parse_address,
)
from jtrain.distributed.launcher.ray.gang import RayWorker, actor_options, first_sentence, watch
from jtrain.distributed.launcher.ray.launch import forwarded
from jtrain.distributed.launcher.ray.node_worker import NodeWorker
from jtrain.distributed.launcher.ray.placement import (
    Resources,
    default_resources,
    parse_resources,
)
from jtrain.errors import UserError
from jtrain.parallel import Server
from jtrain.server.engines.engine import Listening, Role, program

SERVER = {"CPU": 1.0}  # resources of a parameter server


class RayProcess:
    """A process on a node of the cluster, once there is room for it."""

    def __init__(self, words: list[str], environ: Mapping[str, str], resources: Resources):
        ray = import_ray()
        self._actor = ray.remote(NodeWorker).options(**actor_options(resources)).remote()
        self._worker: RayWorker | None = None
        self._error, self._closing = "", threading.Event()
        arguments = words, environ, os.getcwd()
        threading.Thread(target=self._run, args=arguments, daemon=True).start()

    @property
    def end(self) -> str:
        """How it ended; empty while it runs or waits for room."""
        worker = self._worker
        if self._error or worker is None or worker.code is None:
            return self._error
        return worker.exit_reason

    def output(self) -> str:
        """Return its last output."""
        return "" if self._worker is None else self._worker.hidden_output

    def kill(self) -> None:
        """Kill it, and its actor."""
        self._closing.set()
        ray = import_ray()
        with contextlib.suppress(Exception):  # the actor is gone, or the cluster is
            ray.kill(self._actor)

    def _run(self, words: list[str], environ: Mapping[str, str], directory: str) -> None:
        ray = import_ray()
        try:
            host = ray.get(self._actor.host.remote())
            # Number 1: the output of process 0 would be shown at once.
            error = ray.get(self._actor.start.remote(1, words, dict(environ), directory))
        except Exception as found:  # Ray raises many; the actor is dead or was killed
            self._error = f"its Ray actor died: {first_sentence(str(found))}"
            return
        if error:
            self._error = f"{error}, on the node {host.address} of the Ray cluster"
            return
        self._worker = RayWorker(1, self._actor, host)
        with contextlib.suppress(Exception):  # Ray is shut down
            watch([self._worker], self._closing)


class RayEngine:
    """The nodes of a Ray cluster.

    A worker that the cluster has no room for joins when it has.

    Args:
        config: the file with every value of the run, which all nodes see.
        workers: to start.
        resources: of each worker.
    """

    def __init__(self, config: Path, workers: int, resources: Resources):
        self._config, self.workers, self._resources = config.absolute(), workers, resources

    def listening(self, server: Server) -> Listening:
        """Return the loopback where all is on one node, else this node's address."""
        alone = len(cluster_nodes()) == 1
        host = LOOPBACK if alone else import_ray().util.get_node_ip_address()
        return Listening(host, host, server.port)

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> RayProcess:
        """Start a process in an actor of its own."""
        resources = self._resources if role == "worker" else SERVER
        platforms = {} if resources.get("GPU") or resources.get("TPU") else {"JAX_PLATFORMS": "cpu"}
        chosen = {**platforms, **forwarded(os.environ), **environ}
        return RayProcess(program(role, index, self._config), chosen, resources)


@contextlib.contextmanager
def open_ray_engine(config: Path, server: Server) -> Iterator[RayEngine]:
    """Connect to the cluster of RAY_ADDRESS, or start a private one, for a `with` block.

    Raises:
        UserError: if Ray is not installed, or no cluster answers.
        PeerError: if a private one does not start.
    """
    check_ray()
    where = parse_address("", os.environ.get("RAY_ADDRESS", ""))
    typed = parse_resources(server.resources)
    cpus = server.shards + server.workers * max(1.0, typed.get("CPU", 1.0))
    with contextlib.ExitStack() as stack:
        with _same_handlers():
            stack.enter_context(connected(where, cpus=cpus))
        on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
        needed = (
            {"CPU": 1.0, **typed} if typed else default_resources(cluster_nodes(), on_cpu=on_cpu)
        )
        yield RayEngine(config, server.workers, needed)


def check_ray() -> None:
    """Raise UserError, with the command that installs Ray, if it is not installed."""
    try:
        check_installed()
    except UserError:
        raise UserError(
            "parallel.engine=ray needs Ray, which is not installed. Type: pip install "
            "'jtrain[ray]', or set parallel.engine=local to train on this machine"
        ) from None


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
