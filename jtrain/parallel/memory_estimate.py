"""What a step takes on each device under a layout, by shapes alone; nothing is compiled."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.core.types import Dims
from jtrain.parallel.leaf_sharding import StateSharding
from jtrain.parallel.rules import AXES
from jtrain.parallel.strategies.mesh_axes import Axes


class MemoryNeeds(NamedTuple):
    """What a step takes, before anything is split."""

    state: Any
    """Shapes and dtypes of a TrainState."""
    dims: Mapping[str, Dims]
    """The names of the dims of parameters."""
    rows: int
    """Of a microbatch."""
    microbatches: int
    tokens: int
    """Of a row; 0: rows have no time."""
    compute: Any
    """The type of the copy of the parameters that is computed with; None: they themselves."""
    saved: int
    """Bytes that a microbatch keeps from the forward pass for the backward pass."""
    passing: int = 0
    """Bytes that the largest part which is computed again then keeps for itself."""
    gathered: int = 0
    """Bytes of the weights of that part."""


class MemoryEstimate(NamedTuple):
    """Bytes on each device."""

    state: int
    copies: int  # of the parameters, to compute with, and of their gradients
    saved: int  # of the forward pass, for the backward pass
    passing: int  # of the part that is computed again, and its weights

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {gb(size)}" for what, size in self._asdict().items())
        return f"{gb(self.total)} GB a device ({parts})"


def gb(size: int) -> str:
    """Bytes in GB, to three digits."""
    return f"{size / 1e9:.3g}"


def estimate(layout: Axes, needs: MemoryNeeds) -> MemoryEstimate:
    """The bytes on a device, whose sizes the layout must all name.

    Gradients are in the type that is computed with until they are summed over microbatches, which
    is in float32. What the forward pass keeps is split over the rows, the parts of a sequence and,
    with `sequence`, over `tensor`. Of parts that are computed again, one is there at a time, with
    its weights gathered.
    """
    sizes, zero = {axis: getattr(layout, axis) for axis in AXES}, layout.zero
    leaves = StateSharding(sizes, zero, layout.min_size)
    state = sum(
        of.bytes
        for of in leaves.decisions(needs.state, needs.dims)
        if of.leaf.split("/")[0] not in layout.offload
    )

    def params(how: StateSharding, split: bool, dtype: Any) -> int:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), needs.state.params
        )
        return sum(of.bytes for of in how.decisions(like, needs.dims, split=split))

    used, kept = params(leaves.used, zero == 3, needs.compute), params(leaves, zero == 3, None)
    copy = used if needs.compute is not None or used != kept else 0
    gradient = params(leaves, zero > 1, needs.compute)
    if needs.microbatches > 1:
        gradient += params(leaves, zero > 1, jnp.float32)
    time = layout.context * (layout.tensor if layout.sequence else 1)
    each = layout.slice * layout.data * layout.fsdp * layout.expert * time
    passing = needs.passing // each
    if zero == 3 and layout.fsdp > 1:
        passing += needs.gathered // (layout.tensor * layout.expert)
    return MemoryEstimate(state, copy + gradient, needs.saved // each, passing)
