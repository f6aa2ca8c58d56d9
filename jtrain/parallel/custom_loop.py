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

from jtrain.core.mean import Mean
from jtrain.core.types import Tree
from jtrain.errors import ShardingError
from jtrain.parallel.specs import axes_left, check_rank, check_split, leaves_with_specs


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


def run_per_device(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    check: bool = True,
) -> Callable[..., Any]:
    """Return `fn`, called once on each device with what is the device's own.

    The counterpart of TensorFlow's `strategy.run`. Inside, `jax.lax.psum(x, mesh.axis_names)` and
    the like go over all devices, and a gradient is that of the device's own rows.

    ```python
    rows, same = jax.P(strategy.mesh.axis_names), jax.P()
    total = per_device(
        lambda w, x: jax.lax.psum((x @ w).sum(), strategy.mesh.axis_names),
        strategy.mesh,
        in_specs=(same, rows),
        out_specs=same,
    )
    ```

    Args:
        mesh: `strategy.mesh`.
        in_specs: how the arguments are split, as `jax.shard_map` takes it: one spec for all, or a
            tuple with one for each, or trees of them. `jax.P()` gives every device the whole of an
            argument. By default the rows are split over all devices, b ....
        out_specs: the same of the result. `jax.P()` says that all devices come to the same, as a
            sum over them does. By default the rows are put together, b ....
        check: whether a result that was said to be the same on several devices is compared, bit by
            bit. Each call then waits for its result.

    Raises:
        ShardingError: when called, if an argument does not divide, the specs are for other
            arguments or results, or a result is not the same where `out_specs` says so.
    """
    rows = P(mesh.axis_names)
    given, gives = rows if in_specs is None else in_specs, rows if out_specs is None else out_specs

    def copy(*args: Any) -> Any:
        results = fn(*args)
        leaves = leaves_with_specs("out_specs", gives, results, mesh)
        for leaf, x, spec in leaves:
            check_rank(_result(leaf), x, spec)
        shared = [(leaf, x, axes_left(spec, mesh)) for leaf, x, spec in leaves if check]
        return results, {
            leaf: _alike(jnp.asarray(x), axes, mesh) for leaf, x, axes in shared if axes
        }

    mapped = jax.shard_map(copy, mesh=mesh, in_specs=given, out_specs=(gives, P()), check_vma=False)
    copies = jax.jit(mapped)

    def call(*args: Any) -> Any:
        check_split(leaves_with_specs("in_specs", given, args, mesh), mesh)
        results, alike = copies(*args)
        for leaf, same in alike.items():
            if not bool(same):
                raise ShardingError(
                    f"out_specs says that {_result(leaf)} is the same on all devices, and it "
                    f"differs between them. Sum it inside, by jax.lax.psum(x, {mesh.axis_names}); "
                    f"or give each device's own: out_specs=jax.P({mesh.axis_names})."
                )
        return results

    return call


def _result(leaf: str) -> str:
    return f"result {leaf}" if leaf else "the result"


def _alike(x: Array, axes: tuple[str, ...], mesh: Mesh) -> Bool[Array, ""]:
    """Return whether an array has the same bits on all devices along these axes, in every group."""
    bits = _bits(x)
    same = (jax.lax.pmax(bits, axes) == jax.lax.pmin(bits, axes)).all()
    return jax.lax.pmin(same.astype(jnp.int32), mesh.axis_names).astype(bool)


def _bits(x: Array) -> Array:
    """Return an array as whole numbers that differ where the array does: a NaN is itself, too."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_bits(x.real), _bits(x.imag)])
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))
    return x.astype(jnp.uint8) if x.dtype == bool else x


def _mean(values: Shaped[Array, "b *s"], mask: Bool[Array, "b"]) -> Mean:
    seen = jnp.broadcast_to(jnp.expand_dims(mask, range(1, values.ndim)), values.shape)
    return Mean.of(values, seen)


def _is_here(x: Any) -> bool:
    """Whether this process has all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _from_all(x: jax.Array) -> Any:
    return multihost_utils.process_allgather(x, tiled=True)
