"""Makes one JAX of several processes."""

import contextlib
import faulthandler

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.distributed.cluster.rendezvous import Facts, bound, meet, reached
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.heartbeat.exit_alone import fail_alone
from jtrain.errors import ConfigError

# Seconds after which JAX takes a process for dead. Its own 100 keep the others waiting that long;
# the beats come from a thread of C++, which a busy Python does not hold up.
HEARTBEAT_TIMEOUT = 30
# The same where `jtrain launch` watches: a day, for it sees at once which process has died or was
# stopped, and waits for a stopped one as long as it was told to. JAX would end all the others after
# 26 s, by SIGABRT, without their stacks and without the number of the process that was stopped.
WATCHED_TIMEOUT = 24 * 3600


def start(cluster: Cluster, facts: Facts, *, timeout: float) -> None:
    """Joins the processes of a cluster; before JAX knows its devices, and once.

    From then on an error that nobody catches ends this process without waiting for the others.

    Args:
        facts: by name, what has to be the same in all of them.
        timeout: seconds to wait for all of them.

    Raises:
        PeerError: for a process that does not come.
        ConfigError: if they differ, or JAX began before.
    """
    import jax

    if cluster.coordinator is None or cluster.processes == 1:
        return
    meet(cluster, facts, timeout=timeout)
    if cluster.index:
        # A client of gRPC that finds nobody tries again only after a second.
        reached(cluster, timeout).close()
    where = CoordinatorAddress(bound(cluster.coordinator) or "::", cluster.coordinator.port)
    try:
        jax.distributed.initialize(
            str(cluster.coordinator),
            cluster.processes,
            cluster.index,
            local_device_ids=list(cluster.devices) or None,
            cluster_detection_method="deactivate",
            # Without it JAX listens on every interface.
            coordinator_bind_address=str(where),
            initialization_timeout=max(int(timeout), 60),  # all are there
            heartbeat_timeout_seconds=WATCHED_TIMEOUT if HEARTBEAT.watched else HEARTBEAT_TIMEOUT,
        )
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise ConfigError(
            f"{cluster.kind} has {cluster.processes} processes, and in this one JAX was used "
            f"before they met. Write jt.join_processes() as the first line after the imports: "
            f"before anything that asks for devices or makes arrays, as an nnx module does."
        ) from None
    fail_alone()
    if not HEARTBEAT.watched:
        _show_stacks_when_aborted()


def _show_stacks_when_aborted() -> None:
    """Has Python write the stacks of all threads where JAX ends this process for another's sake."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # no stream
            faulthandler.enable()
