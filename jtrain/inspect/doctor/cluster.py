"""Check of the cluster's variables, and of the address at which the processes meet."""

import os
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jtrain.distributed.cluster import Cluster, detect
from jtrain.distributed.cluster.rendezvous import bind_host
from jtrain.errors import ConfigError
from jtrain.inspect.doctor.child import ChildResult
from jtrain.inspect.doctor.finding import Finding, error, ok, warning

PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


class ClusterFacts(NamedTuple):
    """The cluster that the environment describes."""

    cluster: Cluster | None
    """None if its variables are wrong."""
    trouble: str
    """The error of the variables."""
    port_trouble: str
    """Why process 0 cannot listen; empty if it can."""


def gather_cluster(environ: Mapping[str, str]) -> ClusterFacts:
    """Detect the cluster, and bind its port for a moment if this is process 0."""
    try:
        cluster = detect(environ)
    except ConfigError as trouble:
        return ClusterFacts(None, str(trouble), "")
    if cluster.processes == 1 or cluster.index or cluster.coordinator is None:
        return ClusterFacts(cluster, "", "")
    host = bind_host(cluster.coordinator)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:  # bound, and it does not listen: nobody can connect
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, cluster.coordinator.port))
        except OSError as trouble:
            return ClusterFacts(cluster, "", os.strerror(trouble.errno or 0))
    return ClusterFacts(cluster, "", "")


def check_cluster(
    facts: ClusterFacts, environ: Mapping[str, str], result: ChildResult | None = None
) -> Iterator[Finding]:
    """Return findings about the cluster.

    Args:
        result: what `probe_devices` reported, once the processes have tried to meet.
    """
    cluster = facts.cluster
    if cluster is None:
        yield error("cluster", "cluster-variables", *_split(facts.trouble))
        return
    if cluster.processes == 1:
        if "srun" in cluster.warning:
            found = cluster.warning.partition(", so that")[0]
            words = f"{found}: a run would be one process of them all"
            yield warning("cluster", "cluster-without-srun", words, "srun jtrain doctor")
        elif cluster.warning:
            found, _, advice = cluster.warning.rpartition(": ")
            yield warning("cluster", "cluster-alone", found, advice)
        else:
            yield ok("cluster", f"{cluster.kind}; {cluster.note or 'no variable of a cluster'}")
        return
    variables = ", ".join(cluster.by)
    faults = []
    if facts.port_trouble:
        faults.append(
            error(
                "cluster",
                "cluster-port",
                f"process 0 cannot listen at {cluster.coordinator} ({facts.port_trouble})",
                f"give it an address of this machine and a free port by {variables}; see what "
                f"listens: ss -ltnp",
            )
        )
    faults += _check_proxies(cluster, environ)
    reports = result.reports if result else {}
    if "join_error" in reports and not facts.port_trouble:
        faults.append(error("cluster", "cluster-join", *_split(reports["join_error"])))
    elif result and reports.get("stage") == "join":
        faults.append(
            error(
                "cluster",
                "cluster-join",
                f"process {cluster.index} of {cluster.processes} {result.ending} while it joined "
                f"the others at {cluster.coordinator}",
                f"start all {cluster.processes} with the same {variables} and their own number",
            )
        )
    yield from faults
    if not faults:
        met = ", and all met" if "processes" in reports else ""
        yield ok(
            "cluster",
            f"{cluster.kind}: process {cluster.index} of {cluster.processes} at "
            f"{cluster.coordinator}{met}",
        )


def _check_proxies(cluster: Cluster, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check for proxies: JAX's processes talk by gRPC, which goes through them."""
    found = [name for name in PROXIES if environ.get(name)]
    assert cluster.coordinator is not None, "several processes have a coordinator"
    host = cluster.coordinator.host
    direct = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")
    if found and not any(host == name or host.endswith(name) for name in direct if name):
        yield warning(
            "cluster",
            "cluster-proxy",
            f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} set, and JAX's processes "
            f"would talk through that proxy, and may hang",
            f"export no_proxy={','.join([*filter(None, direct), host])}",
        )


def _split(message: str) -> tuple[str, str]:
    """Split an error of jtrain into what was found and what to type."""
    text = " ".join(message.split())
    for start in (". Set ", ". Give ", ". Start ", ". Write ", ". Read "):
        found, mark, remedy = text.partition(start)
        if mark:
            return found, start[2:] + remedy
    return text, "jtrain show CONFIG --cluster"
