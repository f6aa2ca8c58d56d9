"""The memory of a device, in bytes: what it says itself, or what its kind is known to have."""

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
    gib: float  # that a program may use: what libtpu 0.0.51 says of one that is too large


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
    """Bytes that a program may use on each of these, the same in all processes; 0: not known.

    The parts of a CPU share the memory of the machine.
    """
    for chip in CHIPS.values():
        if chip.kind == devices[0].device_kind:
            return int(chip.gib * 2**30)
    here = [device for device in devices if device.process_index == jax.process_index()]
    if here and here[0].platform == "cpu":
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(here)
    else:
        found = min(((d.memory_stats() or {}).get("bytes_limit", 0) for d in here), default=0)
    if jax.process_count() == 1:
        return found
    return int(multihost_utils.process_allgather(np.float32(found)).min())
