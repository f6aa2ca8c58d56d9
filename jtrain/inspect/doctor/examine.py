"""Examination: all checks, those that may hang side by side in child processes."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jtrain.distributed.cluster import Cluster, detect
from jtrain.errors import ConfigError
from jtrain.inspect.doctor.checks import Finding, count_status, error, ok, start_child, warning
from jtrain.inspect.doctor.devices import check_devices
from jtrain.inspect.doctor.disk import check_disk
from jtrain.inspect.doctor.packages import check_packages, gather_packages

CHECKS = ("packages", "devices", "disk", "cluster")


@dataclasses.dataclass(frozen=True)
class Examination:
    """Findings about a machine, and the figures behind them."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, Any]
    """Figures in base units."""
    seconds: float
    process: int = 0

    @property
    def ok(self) -> bool:
        """True if nothing has to be fixed."""
        return not count_status(self.findings, "error")

    def plain(self) -> dict[str, Any]:
        """Return the examination as plain values."""
        return {
            "ok": self.ok,
            "errors": count_status(self.findings, "error"),
            "warnings": count_status(self.findings, "warning"),
            "seconds": self.seconds,
            "process": self.process,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "facts": dict(self.facts),
        }


def examine(
    directory: Path,
    *,
    only: Collection[str] = CHECKS,
    timeout: float = 60.0,
    environ: Mapping[str, str] = os.environ,
) -> Examination:
    """Examine this machine; nothing is left behind.

    Args:
        timeout: seconds that each child process may take.
    """
    begun = time.perf_counter()
    cluster, packages = gather_cluster(environ), gather_packages(sys.path)
    given = {"disk": {"directory": str(directory.absolute())}, "devices": {}}
    with contextlib.ExitStack() as stack:
        waits = {
            name: stack.enter_context(
                start_child(f"{__package__}.{name}", given[name], timeout=timeout, environ=environ)
            )
            for name in given
            if name in only
        }
        found = {
            "packages": check_packages(packages),
            "cluster": list(check_cluster(cluster, environ)),
        }
        ended = {name: wait() for name, wait in waits.items()}
    facts: dict[str, Any] = {}
    if result := ended.get("devices"):
        found["devices"] = list(check_devices(packages, environ, result))
        names = ("jax", "import_seconds", "device_seconds")
        facts["jax"] = {name: result.reports[name] for name in names if name in result.reports}
        facts["devices"] = result.reports.get("devices", [])
    if result := ended.get("disk"):
        found["disk"] = check_disk(directory, result)
        facts["disk"] = {x: result.reports[x] for x in ("space", "write") if x in result.reports}
    process = 0
    if isinstance(cluster, Cluster):
        facts["cluster"], process = cluster.plain(), cluster.index
    return Examination(
        tuple(finding for name in CHECKS if name in only for finding in found[name]),
        facts,
        time.perf_counter() - begun,
        process,
    )


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
