"""Examination: all checks, those that may hang side by side in child processes."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jtrain.distributed.cluster import Cluster
from jtrain.inspect.doctor.child import Child
from jtrain.inspect.doctor.cluster import check_cluster, gather_cluster
from jtrain.inspect.doctor.devices import check_devices, check_thread_pool, gather_devices
from jtrain.inspect.doctor.disk import check_disk
from jtrain.inspect.doctor.finding import Finding, count_status
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
        directory: of the runs.
        only: the checks to make.
        timeout: seconds that each child process may take.
    """
    begun = time.perf_counter()
    facts: dict[str, Any] = {}
    found: dict[str, list[Finding]] = {}
    cluster, packages = gather_cluster(environ), gather_packages(sys.path)
    machine = gather_devices(environ, packages)  # before libtpu is started
    given = {"disk": {"directory": str(directory.absolute())}, "devices": {}}
    with contextlib.ExitStack() as stack:
        children = {
            name: stack.enter_context(
                Child(
                    f"jtrain.inspect.doctor.{name}", given[name], timeout=timeout, environ=environ
                )
            )
            for name in given
            if name in only
        }
        found["packages"] = check_packages(packages)
        found["cluster"] = list(check_cluster(cluster, environ))
        ended = {name: child.wait() for name, child in children.items()}
    if result := ended.get("devices"):
        found["devices"] = [*check_devices(machine, environ, result), *check_thread_pool()]
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
