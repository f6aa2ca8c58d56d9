"""Threads of XLA for the collectives of several CPU devices.

A CPU device holds a thread of XLA's pool in each collective that it waits in. XLA starts the
collectives of one sequence of operations in turn, but a loop or a branch is a sequence of its own:
a device may wait in a collective of a loop and in one after the loop at once. With as many threads
as devices all threads wait at times, none is left to compute what they wait for, and XLA aborts the
process after 60 s: 10 of 10 runs of `fsdp` over 4 devices with 2 microbatches on two cores with jax
0.10.2 (docs/decisions.md). jax 0.12 was not seen to do so.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

from jtrain.distributed.compiler_flags import has_devices

NUMBER = "JAX_NUM_CPU_DEVICES"
POOL = "NPROC"  # read by XLA when JAX starts its devices; the number of cores if it is not set
THREADS, PER_DEVICE = 32, 4  # 16 were enough for the 4 devices above, which hold 3 each at most
_FORCED = re.compile(r"xla_force_host_platform_device_count=(\d+)")
_given: list[int] = []  # the number that `size_thread_pool` gave, if it did


def size_thread_pool(devices: int = 0) -> None:
    """Give XLA enough threads for so many CPU devices, if JAX has not started its devices.

    A number that the user has set stays.

    Args:
        devices: 0 for the number that the environment names.
    """
    forced = _FORCED.search(os.environ.get("XLA_FLAGS", ""))
    number = os.environ.get(NUMBER, forced[1] if forced else "")
    devices = devices or (int(number) if number.isdecimal() else 0)
    if devices > 1 and (_given or POOL not in os.environ) and not has_devices():
        _given[:] = [max(_needed(devices), os.cpu_count() or 1)]
        os.environ[POOL] = str(_given[0])


def release_pool_variable() -> None:
    """Remove the variable after JAX has started its devices: child processes size their own."""
    if _given:
        os.environ.pop(POOL, None)


def count_cpu_devices(devices: Sequence[Any]) -> int:
    """Return how many of some devices are CPU devices of this process."""
    own = [device for device in devices if device.process_index == device.client.process_index()]
    return len(own) if own and own[0].platform == "cpu" else 0


def pool_advice(devices: int) -> str:
    """Return what to type so that XLA has enough threads for so many CPU devices."""
    return (
        f"Import jtrain before JAX starts its devices, or set {POOL}="
        f"{_needed(devices)} before the process starts."
    )


def describe_small_pool(devices: int) -> list[str]:
    """Return a line if JAX's CPU devices were started with fewer threads than are safe."""
    text = os.environ.get(POOL, "")
    threads = _given[0] if _given else int(text) if text.isdecimal() else os.cpu_count() or 1
    if devices < 2 or threads >= PER_DEVICE * devices:
        return []
    return [
        f"XLA has {threads} threads for {devices} CPU devices, whose collectives can deadlock. "
        f"{pool_advice(devices)}"
    ]


def _needed(devices: int) -> int:
    return max(THREADS, PER_DEVICE * devices)
