"""Memory of a device, and the memory that a step needs under a layout, without compiling."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jtrain.core.types import Dims
from jtrain.parallel.chips import find_chip
from jtrain.parallel.devices import Device
from jtrain.parallel.leaf_sharding import StateSharding
from jtrain.parallel.rules import AXES
from jtrain.parallel.strategies.mesh_axes import Axes


class MemoryNeeds(NamedTuple):
    """Memory needs of a step before sharding."""

    state: Any
    """Shapes and dtypes of a TrainState."""
    dims: Mapping[str, Dims]
    """Names of the dims of parameters."""
    rows: int
    """Rows of a microbatch."""
    microbatches: int
    tokens: int
    """Tokens of a row; 0: rows have no time."""
    compute: Any
    """Dtype of the compute copy of the parameters; None: no copy."""
    saved: int
    """Bytes that the forward pass of a microbatch saves for the backward pass."""
    passing: int = 0
    """Bytes that the largest recomputed region saves for itself."""
    gathered: int = 0
    """Bytes of the weights of that region."""


class MemoryEstimate(NamedTuple):
    """Estimated bytes on each device."""

    state: int
    copies: int  # compute copies of the parameters, and gradients
    saved: int  # by the forward pass for the backward pass
    passing: int  # in the recomputed region, and its weights

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {gb(size)}" for what, size in self._asdict().items())
        return f"{gb(self.total)} GB a device ({parts})"


def gb(size: int) -> str:
    """Format bytes as GB, with three digits."""
    return f"{size / 1e9:.3g}"


def estimate(layout: Axes, needs: MemoryNeeds) -> MemoryEstimate:
    """Estimate the bytes on a device for a layout whose sizes are all set.

    Gradients have the compute dtype until they are summed over microbatches in float32. Saved
    activations are split over the rows, the shards of a sequence and, with `sequence`, over
    `tensor`. One recomputed region exists at a time, with its weights gathered.
    """
    sizes, zero = {axis: getattr(layout, axis) for axis in AXES}, layout.zero
    leaves = StateSharding(sizes, zero, layout.min_size)
    state = sum(
        leaf.bytes
        for leaf in leaves.decisions(needs.state, needs.dims)
        if leaf.leaf.split("/")[0] not in layout.offload
    )

    def params(sharding: StateSharding, split: bool, dtype: Any) -> int:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), needs.state.params
        )
        return sum(leaf.bytes for leaf in sharding.decisions(like, needs.dims, split=split))

    used = params(leaves.used, zero == 3, needs.compute)
    stored = params(leaves, zero == 3, None)
    copy = used if needs.compute is not None or used != stored else 0
    gradient = params(leaves, zero > 1, needs.compute)
    if needs.microbatches > 1:
        gradient += params(leaves, zero > 1, jnp.float32)
    time = layout.context * (layout.tensor if layout.sequence else 1)
    shards = layout.slice * layout.data * layout.fsdp * layout.expert * time
    passing = needs.passing // shards
    if zero == 3 and layout.fsdp > 1:
        passing += needs.gathered // (layout.tensor * layout.expert)
    return MemoryEstimate(state, copy + gradient, needs.saved // shards, passing)


def device_memory(devices: Sequence[Device]) -> int:
    """Return the bytes for a program on each device, the same in all processes; 0: not known.

    The devices of a CPU share the memory of the machine.
    """
    chip = find_chip(devices)
    if chip is not None and chip.gib:
        return int(chip.gib * 2**30)
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local and local[0].platform == "cpu":
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(local)
    else:
        size = min(((d.memory_stats() or {}).get("bytes_limit", 0) for d in local), default=0)
    if jax.process_count() == 1:
        return size
    return int(multihost_utils.process_allgather(np.float32(size)).min())
