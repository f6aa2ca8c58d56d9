"""Check of the cluster's variables."""

from collections.abc import Iterator, Mapping

from jtrain.distributed.cluster import Cluster, detect
from jtrain.errors import ConfigError
from jtrain.inspect.doctor.finding import Finding, error, ok, warning

PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


def gather_cluster(environ: Mapping[str, str]) -> Cluster | ConfigError:
    """Return the cluster that the environment describes, or what is wrong with its variables."""
    try:
        return detect(environ)
    except ConfigError as trouble:
        return trouble


def check_cluster(cluster: Cluster | ConfigError, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Return findings about the variables."""
    if isinstance(cluster, ConfigError):
        yield error("cluster", "cluster-variables", *_split(str(cluster)))
    elif cluster.processes > 1:
        yield from _check_proxies(cluster, environ)
        yield ok(
            "cluster",
            f"{cluster.kind}: process {cluster.index} of {cluster.processes} at "
            f"{cluster.coordinator}",
        )
    elif "srun" in cluster.warning:
        found = cluster.warning.partition(", so that")[0]
        words = f"{found}: a run would be one process of them all"
        yield warning("cluster", "cluster-without-srun", words, "srun jtrain doctor")
    elif cluster.warning:
        found, _, advice = cluster.warning.rpartition(": ")
        yield warning("cluster", "cluster-alone", found, advice)
    else:
        yield ok("cluster", f"{cluster.kind}; {cluster.note or 'no variable of a cluster'}")


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
