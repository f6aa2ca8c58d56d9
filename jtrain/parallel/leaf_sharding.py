"""Sharding of each leaf of a state, by its name, its dims and the rules."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from jtrain.core.pytree import name, named_leaves
from jtrain.core.types import Dims, Leaf
from jtrain.parallel.rules import (
    SPLIT,
    SPLITS,
    STATE,
    DimSplit,
    Sizes,
    axes_of,
    spec,
    split_largest,
    split_named,
)

Zero: TypeAlias = Literal[0, 1, 2, 3]


class LeafSharding(NamedTuple):
    """Sharding of one leaf, with its reason and size."""

    leaf: str
    shape: tuple[int, ...]
    choice: DimSplit
    full_bytes: int  # bytes of the full leaf
    bytes: int  # on each device
    host: bool = False  # in the memory of the host between steps

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Axes of each dim."""
        return tuple(axes_of(self.choice.spec, dim) for dim in range(len(self.shape)))


KEY = "seed"
"""The state's random key: JAX draws with both of its numbers."""


@dataclasses.dataclass(frozen=True)
class StateSharding:
    """Sharding of the leaves of a state over a mesh.

    Named dims are split by the rules. A leaf that is still replicated over an axis of `over` is
    then split over that axis by its largest dim, if `zero` includes the leaf and it has at least
    `min_size` elements.

    `zero` includes, 1: the optimizer's state; 2: also the gradients that are summed over
    microbatches; 3: also the parameters and all else. Source: Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054.
    """

    sizes: Sizes
    zero: Zero = 3
    min_size: int = 0
    over: tuple[str, ...] = SPLITS
    """Axes that replicated state is split over."""

    @property
    def used(self) -> "StateSharding":
        """Sharding of the parameters inside a step, gathered over `context` and `expert`."""
        return dataclasses.replace(self, over=(SPLIT,))

    def specs(self, tree: Any, dims: Mapping[str, Dims], *, split: bool | None = None) -> Any:
        """Return the spec of each leaf, in a tree of its structure; `split` overrides `zero`."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.choose(name(path), leaf.shape, dims, split).spec, tree
        )

    def decisions(
        self, tree: Any, dims: Mapping[str, Dims], *, split: bool | None = None
    ) -> list[LeafSharding]:
        """Return the sharding of each leaf, in order."""
        found = []
        for leaf, array in named_leaves(tree).items():
            choice = self.choose(leaf, array.shape, dims, split)
            shards = math.prod(
                self.sizes[a] for d in range(array.ndim) for a in axes_of(choice.spec, d)
            )
            size = math.prod(array.shape) * array.dtype.itemsize
            found.append(LeafSharding(leaf, tuple(array.shape), choice, size, size // shards))
        return found

    def choose(
        self, leaf: str, shape: tuple[int, ...], dims: Mapping[str, Dims], split: bool | None = None
    ) -> DimSplit:
        """Return the split of a leaf."""
        moments = leaf.split("/")[0] == "opt_state"
        included = (self.zero >= (1 if moments else 3)) if split is None else split
        splits = [axis for axis in self.over if self.sizes.get(axis, 1) > 1]
        small = math.prod(shape) < self.min_size
        over = included and splits and not small and leaf != KEY
        rules = {**STATE, "width": splits if over else ()}
        choice = DimSplit()
        named = leaf_dims(leaf, len(shape), dims)
        if named is not None:
            choice = split_named(shape, named, rules, self.sizes)
        if over:
            for axis in splits:
                if not any(axis in axes_of(choice.spec, dim) for dim in range(len(shape))):
                    choice = split_largest(shape, choice, axis, self.sizes)
            return choice
        if included and splits and small and shape:
            why = f"fewer than {self.min_size} elements"
            return choice._replace(left=(*choice.left, why))
        return choice


def leaf_dims(leaf: str, ndim: int, dims: Mapping[str, Dims]) -> Dims | None:
    """Return the names of a leaf's dims: those of the parameter whose name is its suffix, if any.

    So Adam's moments, `opt_state/0/mu/blocks/0/up/kernel`, have the dims of `blocks/0/up/kernel`.
    """
    parts = leaf.split("/")
    for first in range(len(parts)):
        named = dims.get("/".join(parts[first:]))
        if named is not None:
            return named if len(named) == ndim else None
    return None


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
