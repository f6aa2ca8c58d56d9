"""Sharding of matrices for optimizers that work on whole ones: each on one device, and back."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from jtrain.core.types import Dims, Leaf
from jtrain.parallel.leaf_sharding import StateSharding
from jtrain.parallel.rules import axes_of, spec


class MatrixGroup(NamedTuple):
    """Matrices that are split alike, and are moved together."""

    leaf: str  # the only leaf; empty: all such leaves
    shape: tuple[int, int]
    dtype: str
    axes: tuple[tuple[str, ...], tuple[str, ...]]  # of both dims


class WholeMatrices:
    """Moves stacks of matrices, n d f, whose last two dims are split over the axes of a mesh.

    Args:
        leaves: the split of gradients.
        split: whether they are split over `fsdp`, as `StateSharding.choose` takes it.
    """

    def __init__(self, mesh: Mesh, leaves: StateSharding, dims: Mapping[str, Dims], split: bool):
        self._mesh, self._leaves, self._dims, self._split = mesh, leaves, dims, split

    def group(self, name: str, leaf: Leaf) -> MatrixGroup | None:
        """Return the group of a leaf `*n d f`; None: its matrices are whole, or stacks are split.

        A leaf that stacks enough matrices for all devices is a group of its own: it is moved
        without a copy.
        """
        chosen = self._leaves.choose(name, leaf.shape, self._dims, self._split).spec
        axes = [axes_of(chosen, dim) for dim in range(leaf.ndim)]
        if any(axes[:-2]) or not any(axes[-2:]):
            return None
        group = MatrixGroup("", leaf.shape[-2:], str(leaf.dtype), (axes[-2], axes[-1]))
        fills = math.prod(leaf.shape[:-2]) % self.shards(group) == 0
        return group._replace(leaf=name) if fills else group

    def shards(self, group: MatrixGroup) -> int:
        """Return the number of shards of a stack after `gather`."""
        return math.prod(self._mesh.shape[axis] for axes in group.axes for axis in axes)

    def gather(self, stack: Float[Array, "n d f"], group: MatrixGroup) -> Float[Array, "n d f"]:
        """Return a stack with whole matrices on each device, by one all-to-all for each axis."""
        for step in self._steps(group):
            stack = jax.lax.with_sharding_constraint(stack, step)
        return stack

    def scatter(self, stack: Float[Array, "n d f"], group: MatrixGroup) -> Float[Array, "n d f"]:
        """Return a stack split as the leaves are."""
        for step in reversed(self._steps(group)):
            stack = jax.lax.with_sharding_constraint(stack, step)
        return stack

    def _steps(self, group: MatrixGroup) -> list[NamedSharding]:
        """Return the shardings from that of the leaves to that of whole matrices."""
        first, second = group.axes
        moves = [*(("d", axis) for axis in first), *(("f", axis) for axis in second)]
        steps = []
        for count in range(len(moves) + 1):
            moved, rest = moves[:count], moves[count:]
            dims = [
                tuple(axis for _, axis in moved),
                tuple(axis for dim, axis in rest if dim == "d"),
                tuple(axis for dim, axis in rest if dim == "f"),
            ]
            steps.append(NamedSharding(self._mesh, spec(dims)))
        return steps
