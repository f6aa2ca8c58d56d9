"""Engine of tasks that a launcher has started: Slurm's, or those of TF_CONFIG."""

from collections.abc import Mapping

from jtrain.distributed.cluster.cluster import Cluster
from jtrain.distributed.cluster.rendezvous import bind_host
from jtrain.parallel import Server
from jtrain.server.engines.engine import Listening, Role
from jtrain.server.processes.registry import Registry


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
