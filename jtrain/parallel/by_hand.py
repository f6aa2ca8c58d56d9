"""What people who come from `strategy.run`, `strategy.reduce` and `strategy.gather` look for.

A step needs none of them: its arrays are global, its sums are the compiler's, and a loss returns a
`Mean`. They are for programs around it.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Shaped

from jtrain.errors import ShardingError
from jtrain.types import Mean, Tree


def gather(tree: Tree, mask: Bool[Any, "b"] | None = None) -> Tree:
    """The arrays whole on the host of every process, as numpy, their rows in the order of the data.

    Args:
        tree: arrays, wherever their parts are.
        mask: which rows are real; those it hides are left out. Without it all are given.
    """
    whole = lambda x: np.asarray(x if _is_here(x) else _from_all(x))
    if mask is None:
        return jax.tree.map(whole, tree)
    real = whole(mask)
    return jax.tree.map(lambda x: whole(x)[real], tree)


def reduce(
    how: Literal["mean", "sum"],
    values: Shaped[Array, "b *s"],
    mask: Bool[Array, "b"] | None = None,
) -> float:
    """The mean or the sum over the rows on all devices, each real row counted once.

    Not a mean of means: of 4 and 2 rows on two devices each row weighs a sixth.

    Args:
        how: "mean" or "sum".
        values: one number a row, or several, which all count alike.
        mask: which rows are real; all without it.
    """
    seen = jnp.ones(len(values), bool) if mask is None else mask
    mean = jax.jit(_mean)(values, seen)
    if how == "sum":
        return float(gather(mean.total))
    return float(Mean(*gather((mean.total, mean.weight))).value())


def per_device(fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`fn` called on each device with its part of the rows: what `strategy.run` does.

    Arguments and results are arrays b ...; inside, `jax.lax.psum(x, mesh.axis_names)` and the like
    go over all devices. `strategy.mesh` is the mesh of a strategy.

    Raises:
        ShardingError: when called, if the rows do not divide into the devices.
    """
    rows = P(mesh.axis_names)
    copies = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))

    def call(*trees: Any) -> Any:
        for x in jax.tree.leaves(trees):
            if len(x) % mesh.size:
                lower, upper = len(x) // mesh.size * mesh.size, -(-len(x) // mesh.size) * mesh.size
                near = f"{lower} or {upper}" if lower else f"{upper}"
                raise ShardingError(
                    f"{len(x)} rows do not divide into {mesh.size} devices. Nearest: {near}; pad "
                    f"them, and say by a mask which are real."
                )
        return copies(*trees)

    return call


def _mean(values: Shaped[Array, "b *s"], mask: Bool[Array, "b"]) -> Mean:
    seen = jnp.broadcast_to(jnp.expand_dims(mask, range(1, values.ndim)), values.shape)
    return Mean.of(values, seen)


def _is_here(x: Any) -> bool:
    """Whether this process has all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _from_all(x: jax.Array) -> Any:
    return multihost_utils.process_allgather(x, tiled=True)
