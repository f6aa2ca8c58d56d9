"""Number of devices into which JAX splits a CPU, as set in the environment."""

from collections.abc import Mapping

NUMBER = "JAX_NUM_CPU_DEVICES"


def sets_cpu_devices(environ: Mapping[str, str]) -> bool:
    """Return whether the environment sets it, by JAX's variable or by XLA's flag."""
    forced = "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", "")
    return forced or NUMBER in environ
