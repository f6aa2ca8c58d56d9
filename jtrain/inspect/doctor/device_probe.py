"""Start of JAX's devices in a child process; again without the flags that end it."""

import sys
from collections.abc import Mapping
from typing import Any

from jtrain.distributed.compiler_flags import refused_flags, without_flags
from jtrain.inspect.doctor.child import Child, ChildResult
from jtrain.inspect.doctor.cluster import ClusterFacts
from jtrain.inspect.doctor.finding import Finding
from jtrain.inspect.doctor.xla_flags import check_refused

PROBE = "jtrain.inspect.doctor.probe_devices"
TRIES = 4  # each without what the one before refused


class DeviceProbe:
    """The child that starts JAX's devices."""

    def __init__(
        self,
        environ: Mapping[str, str],
        met: ClusterFacts,
        *,
        timeout: float,
        interconnect: bool,
    ):
        """Start the child.

        Args:
            met: the cluster, whose processes the child joins.
            timeout: seconds that it may take.
            interconnect: whether it sums over the devices.
        """
        self._environ, self._timeout = environ, timeout
        several = met.cluster is not None and met.cluster.processes > 1
        self._given: dict[str, Any] = {
            "join": several and not met.port_trouble,
            "interconnect": interconnect,
            "facts": {"python": ".".join(map(str, sys.version_info[:3]))},
        }
        self._children = [self._begin(environ)]

    def __enter__(self) -> "DeviceProbe":
        return self

    def __exit__(self, *_) -> None:
        for child in self._children:
            child.__exit__()

    def wait(self) -> tuple[ChildResult, list[Finding]]:
        """Return what the child reported, and findings about refused flags."""
        result, errors, names = self._children[-1].wait(), "", []
        for _ in range(TRIES):
            refused = refused_flags(result.errors)
            if result.code in (0, None) or not refused:
                break
            errors += result.errors
            names += refused
            if self._given["join"]:  # the other processes died of the same flags
                break
            self._children.append(self._begin(without_flags(self._environ, names)))
            result = self._children[-1].wait()
        return result, list(check_refused(self._environ, names, errors))

    def _begin(self, environ: Mapping[str, str]) -> Child:
        return Child(PROBE, self._given, timeout=self._timeout, environ=environ)
