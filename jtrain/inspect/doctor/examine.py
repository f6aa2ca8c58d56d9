"""Examination: all checks, those that may hang side by side in child processes."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jtrain.inspect.doctor import cluster, disk, memory
from jtrain.inspect.doctor.child import Child, ChildResult
from jtrain.inspect.doctor.devices import check_devices, gather_devices
from jtrain.inspect.doctor.finding import Finding, count_status
from jtrain.inspect.doctor.packages import check_packages, gather_packages
from jtrain.inspect.doctor.python_version import python_findings

CHECKS = ("python", "packages", "devices", "memory", "disk", "cluster")
PROBE_DISK = "jtrain.inspect.doctor.probe_disk"
PROBE_DEVICES = "jtrain.inspect.doctor.probe_devices"


@dataclasses.dataclass(frozen=True)
class Examination:
    """Findings about a machine, and the figures behind them."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, Any]
    """Figures in base units, by check."""
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
            "findings": [finding.plain() for finding in self.findings],
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
        directory: of the runs, or of one run.
        only: the checks to make.
        timeout: seconds that each child process may take.
    """
    begun = time.perf_counter()
    facts: dict[str, Any] = {}
    met, packages = cluster.gather_cluster(environ), gather_packages(sys.path)
    machine = gather_devices(environ, packages)  # before libtpu is started
    with contextlib.ExitStack() as stack:

        def start(module: str, given: Mapping[str, Any]) -> Child:
            return stack.enter_context(Child(module, given, timeout=timeout, environ=environ))

        on_disk = probe = None
        if "disk" in only:
            on_disk = start(PROBE_DISK, {"directory": str(directory.absolute())})
        if {"devices", "cluster"} & {*only}:
            several = met.cluster is not None and met.cluster.processes > 1
            python = ".".join(map(str, sys.version_info[:3]))
            join = several and not met.port_trouble
            probe = start(PROBE_DEVICES, {"join": join, "facts": {"python": python}})
        quick = {
            "python": lambda: python_findings(environ),
            "packages": lambda: check_packages(packages),
            "memory": lambda: _memory(facts),
        }
        found = {name: check() for name, check in quick.items() if name in only}
        disk_result = on_disk.wait() if on_disk else None
        started = probe.wait() if probe else None
    if started:
        found["devices"] = list(check_devices(machine, environ, started))
        _record_start(facts, started)
    found["cluster"] = list(cluster.check_cluster(met, environ, started))
    if disk_result:
        found["disk"] = _disk(directory, disk_result, facts)
    if met.cluster:
        facts["cluster"] = met.cluster.plain()
    return Examination(
        tuple(finding for name in CHECKS if name in only for finding in found.get(name, ())),
        facts,
        time.perf_counter() - begun,
        met.cluster.index if met.cluster else 0,
    )


def _record_start(facts: dict[str, Any], started: ChildResult) -> None:
    """Record the figures of the start of JAX's devices."""
    reports = started.reports
    facts["devices"] = reports.get("devices", [])
    facts["jax"] = {
        key: reports[key] for key in ("jax", "import_seconds", "device_seconds") if key in reports
    }


def _memory(facts: dict[str, Any]) -> list[Finding]:
    gathered = memory.gather_memory()
    facts["memory"] = {
        "total": gathered.total,
        "available": gathered.available,
        "limit": gathered.limit,
        "free": gathered.free,
    }
    return list(memory.check_memory(gathered))


def _disk(directory: Path, result: ChildResult, facts: dict[str, Any]) -> list[Finding]:
    reports = result.reports
    place = Path(reports.get("existing", directory.absolute()))
    facts["disk"] = {key: reports[key] for key in ("space", "write") if reports.get(key)}
    needed = 2 * disk.checkpoint_bytes(directory) if result.code is not None else 0
    kind = disk.filesystem(place.resolve(), disk.mounts())
    return disk.check_disk(directory, result, kind=kind, needed=needed)
