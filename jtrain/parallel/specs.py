"""Checks of the specs that split arguments and results over a mesh."""

import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jtrain.core.pytree import name
from jtrain.errors import ShardingError
from jtrain.parallel.rules import axes_of


def leaves_with_specs(what: str, specs: Any, tree: Any, mesh: Mesh) -> list[tuple[str, Any, P]]:
    """Return each leaf of `tree` with its name and spec.

    Args:
        what: the name of the argument with the specs: in_specs or out_specs.
        specs: a spec, or a tree of specs for the subtrees of `tree`.

    Raises:
        ShardingError: if the specs do not match the tree, or name an axis that the mesh lacks.
    """
    is_spec = lambda x: isinstance(x, P)
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        if not is_spec(spec):
            raise ShardingError(
                f"{what} holds {spec!r}, which is no spec. Write jax.P() for arrays equal on "
                f"all devices, jax.P({mesh.axis_names}) for rows."
            )
        for axis in (axis for dim in range(len(spec)) for axis in axes_of(spec, dim)):
            if axis not in mesh.shape:
                raise ShardingError(
                    f"{what} names the axis {axis!r}, and the mesh has "
                    f"{', '.join(mesh.axis_names)}. Take one of these."
                )
    try:
        each = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    except ValueError as error:
        wanted = jax.tree.structure(tree, is_leaf=lambda x: x is not tree)
        raise ShardingError(
            f"{what} has the structure {jax.tree.structure(specs, is_leaf=is_spec)}, and its "
            f"values have {wanted}. Give one spec for all, or one for each."
        ) from error
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(tree),
        jax.tree.leaves(each, is_leaf=is_spec),
        strict=True,
    )
    return [(name(path), leaf, spec) for (path, leaf), spec in pairs]


def check_split(leaves: list[tuple[str, Any, P]], mesh: Mesh) -> None:
    """Raise unless the arguments of a function divide by their specs.

    Raises:
        ShardingError: with the nearest sizes.
    """
    for leaf, x, spec in leaves:
        check_rank(f"argument {leaf}", x, spec)
        for dim, size in enumerate(jax.numpy.shape(x)):
            axes = axes_of(spec, dim)
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % parts:
                lower, upper = size // parts * parts, -(-size // parts) * parts
                near = f"{lower} or {upper}" if lower else f"{upper}"
                what = f"{size} rows" if dim == 0 else f"{size} elements of dim {dim}"
                raise ShardingError(
                    f"{what} of argument {leaf} do not divide into {parts} devices "
                    f"({' x '.join(axes)}). Nearest: {near}; pad the argument, with a mask of the "
                    f"real rows. Or give every device the whole argument: jax.P() in in_specs."
                )


def check_rank(what: str, x: Any, spec: P) -> None:
    """Raise unless an array has the dims that its spec splits.

    Raises:
        ShardingError: with a spec that fits.
    """
    ndim = jax.numpy.ndim(x)
    split = [dim for dim in range(len(spec)) if axes_of(spec, dim)]
    if split and split[-1] >= ndim:
        shape = f"{ndim} dims" if ndim > 1 else "one dim" if ndim else "none: it is a single number"
        raise ShardingError(
            f"The spec of {what} splits its dim {split[-1]}, and it has {shape}. Give jax.P() "
            f"if it is equal on all devices, or a dim to split: x[None]."
        )


def axes_left(spec: P, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which all devices have equal values."""
    taken = {axis for dim in range(len(spec)) for axis in axes_of(spec, dim)}
    return tuple(axis for axis in mesh.axis_names if axis not in taken)
