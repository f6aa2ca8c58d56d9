"""Memory of a device in bytes: as the device reports, or as known for its kind."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain.parallel.devices import Device


class Chip(NamedTuple):
    """A kind of TPU."""

    kind: str  # as JAX calls it
    gib: float  # for a program, from the error of libtpu 0.0.51 for one that is too large


CHIPS: Mapping[str, Chip] = {
    "v2": Chip("TPU v2", 7.48),
    "v3": Chip("TPU v3", 15.48),
    "v4": Chip("TPU v4", 15.25),
    "v5e": Chip("TPU v5 lite", 15.75),
    "v5p": Chip("TPU v5", 95.73),
    "v6e": Chip("TPU v6 lite", 31.24),
    "tpu7x": Chip("TPU7x", 94.74),
}


def device_memory(devices: Sequence[Device]) -> int:
    """Return the bytes for a program on each device, the same in all processes; 0: not known.

    The devices of a CPU share the memory of the machine.
    """
    for chip in CHIPS.values():
        if chip.kind == devices[0].device_kind:
            return int(chip.gib * 2**30)
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local and local[0].platform == "cpu":
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(local)
    else:
        size = min(((d.memory_stats() or {}).get("bytes_limit", 0) for d in local), default=0)
    if jax.process_count() == 1:
        return size
    return int(multihost_utils.process_allgather(np.float32(size)).min())
