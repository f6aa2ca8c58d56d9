"""Examination: all checks, those that may hang side by side in child processes."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jtrain.inspect.doctor import clock, cluster, disk, memory, xla_flags
from jtrain.inspect.doctor.child import Child, ChildResult
from jtrain.inspect.doctor.device_probe import DeviceProbe
from jtrain.inspect.doctor.devices import check_devices, gather_devices
from jtrain.inspect.doctor.finding import Finding, count_status
from jtrain.inspect.doctor.interconnect import check_interconnect
from jtrain.inspect.doctor.packages import check_packages, gather_packages
from jtrain.inspect.doctor.python_version import python_findings

CHECKS = (
    "python",
    "packages",
    "flags",
    "devices",
    "interconnect",
    "memory",
    "disk",
    "cache",
    "clock",
    "cluster",
)
PROBE_DISK = "jtrain.inspect.doctor.probe_disk"
STARTS = {"devices", "interconnect", "flags", "cluster"}  # checks that need JAX's devices


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
    begun, first = time.perf_counter(), clock.read_clock()
    facts: dict[str, Any] = {}
    met, packages = cluster.gather_cluster(environ), gather_packages(sys.path)
    machine = gather_devices(environ, packages)  # before libtpu is started
    with contextlib.ExitStack() as stack:
        on_disk = probe = None
        if {"disk", "clock"} & {*only}:
            given = {"directory": str(directory.absolute())}
            child = Child(PROBE_DISK, given, timeout=timeout, environ=environ)
            on_disk = stack.enter_context(child)
        if STARTS & {*only}:
            probe = stack.enter_context(
                DeviceProbe(environ, met, timeout=timeout, interconnect="interconnect" in only)
            )
        quick = {
            "python": lambda: python_findings(environ),
            "packages": lambda: check_packages(packages),
            "memory": lambda: _memory(facts),
            "cache": lambda: _cache(environ, facts),
        }
        found = {name: check() for name, check in quick.items() if name in only}
        disk_result = on_disk.wait() if on_disk else None
        started, refused = probe.wait() if probe else (None, [])
    if started:
        found["flags"] = refused or list(xla_flags.check_flags(environ))
        found["devices"] = list(check_devices(machine, environ, started))
        found["interconnect"] = list(check_interconnect(started))
        _record_start(facts, started)
    found["cluster"] = list(cluster.check_cluster(met, environ, started))
    if disk_result:
        found["disk"] = _disk(directory, disk_result, facts)
        found["clock"] = _clock(first, disk_result, started)
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
    if "interconnect" in reports:
        facts["interconnect"] = reports["interconnect"]


def _clock(
    first: clock.ClockReading, on_disk: ChildResult, started: ChildResult | None
) -> list[Finding]:
    skew = started.reports.get("clock_skew", 0.0) if started else 0.0
    times = on_disk.reports.get("mtime")
    return list(clock.check_clock(first, clock.read_clock(), times and tuple(times), skew))


def _memory(facts: dict[str, Any]) -> list[Finding]:
    gathered = memory.gather_memory()
    facts["memory"] = {
        "total": gathered.total,
        "available": gathered.available,
        "limit": gathered.limit,
        "free": gathered.free,
    }
    return list(memory.check_memory(gathered))


def _cache(environ: Mapping[str, str], facts: dict[str, Any]) -> list[Finding]:
    from jtrain.inspect.doctor import cache

    gathered = cache.gather_cache(environ)
    facts["cache"] = {"entries": gathered.entries, "bytes": gathered.num_bytes}
    return list(cache.check_cache(gathered))


def _disk(directory: Path, result: ChildResult, facts: dict[str, Any]) -> list[Finding]:
    reports = result.reports
    place = Path(reports.get("existing", directory.absolute()))
    facts["disk"] = {key: reports[key] for key in ("space", "write") if reports.get(key)}
    needed = 2 * disk.checkpoint_bytes(directory) if result.code is not None else 0
    kind = disk.filesystem(place.resolve(), disk.mounts())
    return disk.check_disk(directory, result, kind=kind, needed=needed)
