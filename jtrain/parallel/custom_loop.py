"""Counterparts of TensorFlow's `strategy.run`, `strategy.reduce` and `strategy.gather`.

A step needs none of these functions: arrays are global, the compiler reduces, and a loss returns a
`Mean`. They are for custom loops.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Shaped

from jtrain.core.mean import Mean
from jtrain.core.pytree import name
from jtrain.core.types import Tree
from jtrain.errors import ShardingError
from jtrain.parallel.rules import axes_of


def gather(tree: Tree, mask: Bool[Any, "b"] | None = None) -> Tree:
    """Gather arrays on the host of every process, as numpy, with rows in the order of the data.

    Args:
        mask: which rows are real; only these are returned. None: all rows.
    """
    full = lambda x: np.asarray(x if _is_local(x) else _all_gather(x))
    if mask is None:
        return jax.tree.map(full, tree)
    real = full(mask)
    return jax.tree.map(lambda x: full(x)[real], tree)


def reduce(
    how: Literal["mean", "sum"],
    values: Shaped[Array, "b *s"],
    mask: Bool[Array, "b"] | None = None,
) -> float:
    """Return the mean or the sum over the rows of all devices, each real row counted once.

    The result is not a mean of means: with 4 and 2 rows on two devices each row weighs a sixth.

    Args:
        values: one number a row, or several, all of equal weight.
        mask: which rows are real; None: all.
    """
    real = jnp.ones(len(values), bool) if mask is None else mask
    if jnp.issubdtype(values.dtype, jnp.integer):  # float32 has no odd number above 2^24
        rows = gather(values, real)
        return float(Mean(rows.sum(dtype=np.float64), rows.size if how == "mean" else 1).value())
    mean = jax.jit(_mean)(values, real)
    if how == "sum":
        return float(gather(mean.total))
    return float(Mean(*gather((mean.total, mean.weight))).value())


def run_per_device(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    check: bool = True,
) -> Callable[..., Any]:
    """Return `fn`, called once on each device with the shards of the device.

    The counterpart of TensorFlow's `strategy.run`. Inside, collectives such as
    `jax.lax.psum(x, mesh.axis_names)` run over all devices, and a gradient is that of the device's
    rows.

    ```python
    rows, same = jax.P(strategy.mesh.axis_names), jax.P()
    total = run_per_device(
        lambda w, x: jax.lax.psum((x @ w).sum(), strategy.mesh.axis_names),
        strategy.mesh,
        in_specs=(same, rows),
        out_specs=same,
    )
    ```

    Args:
        mesh: `strategy.mesh`.
        in_specs: specs of the arguments, as in `jax.shard_map`: one for all, or a tuple with one
            for each, or trees of specs. `jax.P()` gives every device the full argument. By default
            rows are split over all devices, b ....
        out_specs: specs of the result. `jax.P()` declares equal results on all devices, such as a
            sum over them. By default rows are concatenated, b ....
        check: compare results that are declared equal, bit by bit. Each call then waits for its
            result.

    Raises:
        ShardingError: when called, if an argument does not divide, the specs are for other
            arguments or results, or results that `out_specs` declares equal differ.
    """
    rows = P(mesh.axis_names)
    in_specs = rows if in_specs is None else in_specs
    out_specs = rows if out_specs is None else out_specs

    def replica(*args: Any) -> Any:
        results = fn(*args)
        leaves = leaves_with_specs("out_specs", out_specs, results, mesh)
        for leaf, x, spec in leaves:
            check_rank(_result(leaf), x, spec)
        shared = [(leaf, x, axes_left(spec, mesh)) for leaf, x, spec in leaves if check]
        return results, {
            leaf: _is_equal(jnp.asarray(x), axes, mesh) for leaf, x, axes in shared if axes
        }

    mapped = jax.shard_map(
        replica, mesh=mesh, in_specs=in_specs, out_specs=(out_specs, P()), check_vma=False
    )
    jitted = jax.jit(mapped)

    def call(*args: Any) -> Any:
        check_split(leaves_with_specs("in_specs", in_specs, args, mesh), mesh)
        results, equal = jitted(*args)
        for leaf, same in equal.items():
            if not bool(same):
                raise ShardingError(
                    f"out_specs declares {_result(leaf)} equal on all devices, and it "
                    f"differs between them. Sum it inside, by jax.lax.psum(x, {mesh.axis_names}); "
                    f"or return each device's own: out_specs=jax.P({mesh.axis_names})."
                )
        return results

    return call


def _result(leaf: str) -> str:
    return f"result {leaf}" if leaf else "the result"


def _is_equal(x: Array, axes: tuple[str, ...], mesh: Mesh) -> Bool[Array, ""]:
    """Return whether an array has the same bits on all devices along these axes, in every group."""
    bits = _bits(x)
    same = (jax.lax.pmax(bits, axes) == jax.lax.pmin(bits, axes)).all()
    return jax.lax.pmin(same.astype(jnp.int32), mesh.axis_names).astype(bool)


def _bits(x: Array) -> Array:
    """Return the bits of an array as integers, so that equal NaNs are equal."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_bits(x.real), _bits(x.imag)])
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))
    return x.astype(jnp.uint8) if x.dtype == bool else x


def _mean(values: Shaped[Array, "b *s"], mask: Bool[Array, "b"]) -> Mean:
    real = jnp.broadcast_to(jnp.expand_dims(mask, range(1, values.ndim)), values.shape)
    return Mean.of(values, real)


def _is_local(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _all_gather(x: jax.Array) -> Any:
    return multihost_utils.process_allgather(x, tiled=True)


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
                f"{what} holds {spec!r}, which is not a spec. Write jax.P() for arrays equal on "
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
