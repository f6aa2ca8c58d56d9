"""Start of JAX in the processes of a cluster."""

import contextlib
import faulthandler
import inspect
import os

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.distributed.cluster.rendezvous import TOKEN, Facts, bind_host, connect, meet
from jtrain.distributed.cluster.tls import PeerTls
from jtrain.distributed.heartbeat import HEARTBEAT, connect_heartbeat
from jtrain.distributed.shutdown import fail_alone
from jtrain.errors import ConfigError

# Seconds after which JAX takes a process for dead. JAX's default of 100 keeps the others waiting
# that long; a C++ thread sends the heartbeats, and a busy Python does not delay it.
HEARTBEAT_TIMEOUT = 30
# The same under `jtrain launch`: a day, since the launcher notices at once which process died or
# was stopped, and waits for a stopped process as long as its patience allows. JAX would end all
# others after 26 s, by SIGABRT, without their stacks and without the number of the stopped process.
WATCHED_TIMEOUT = 24 * 3600


def start(cluster: Cluster, facts: Facts, *, timeout: float) -> None:
    """Join the processes of a cluster; call it once, before JAX knows its devices.

    From then on an uncaught error ends this process without waiting for the others.

    Args:
        facts: values by name that must be equal in all processes.
        timeout: seconds to wait for all processes.

    Raises:
        PeerError: if a process does not connect.
        ConfigError: if the processes differ, JAX was started before, or the certificates of
            JAX_MTLS_CERT_FILE cannot be used.
    """
    import jax

    connect_heartbeat()
    if cluster.coordinator is None or cluster.processes == 1:
        return
    names = inspect.signature(jax.distributed.initialize).parameters
    tls = PeerTls.read(os.environ, supported="mtls_cert_file" in names)
    meet(cluster, facts, timeout=timeout, tls=tls, token=os.environ.get(TOKEN, ""))
    if cluster.index:
        # A gRPC client that finds no listener retries only after a second.
        connect(cluster, timeout).close()
    address = CoordinatorAddress(bind_host(cluster.coordinator) or "::", cluster.coordinator.port)
    try:
        jax.distributed.initialize(
            str(cluster.coordinator),
            cluster.processes,
            cluster.index,
            local_device_ids=list(cluster.devices) or None,
            cluster_detection_method="deactivate",
            # The default listens on every interface.
            coordinator_bind_address=str(address),
            initialization_timeout=max(int(timeout), 60),  # all processes are present
            heartbeat_timeout_seconds=WATCHED_TIMEOUT if HEARTBEAT.watched else HEARTBEAT_TIMEOUT,
        )
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise ConfigError(
            f"{cluster.kind} has {cluster.processes} processes, and this one used JAX before they "
            f"met. Write jt.join_processes() as the first line after the imports: before anything "
            f"that asks for devices or makes arrays, such as an nnx module."
        ) from None
    fail_alone()
    if not HEARTBEAT.watched:
        _show_stacks_on_abort()


def _show_stacks_on_abort() -> None:
    """Write the stacks of all threads if JAX aborts this process because of another one."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # no stream
            faulthandler.enable()
