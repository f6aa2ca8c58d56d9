"""Explicit mesh axes, over which each array has its split in its type.

Over such axes JAX refuses an operation that would move an array, or whose result could be split in
more than one way: an unintended exchange is an error, and no gather that nobody notices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from jtrain.core.loss import Stateful
from jtrain.core.types import LossFn, Params
from jtrain.parallel.rules import SPLIT

GATHERED = "gathered"
OfLeaves: TypeAlias = Callable[[Any], Any]  # weights -> a value for each leaf


def is_explicit() -> bool:
    """Return whether what is being traced has explicit axes."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def spec_of(x: Shaped[Array, "..."]) -> tuple[Any, ...]:
    """Return the axes of each dim, where axes are explicit."""
    return tuple(jax.typeof(x).sharding.spec)


def without(axes: Any, others: Any) -> Any:
    """Return the axes of a dim without those of another."""
    return tuple(axis for axis in names(axes) if axis not in names(others)) or None


def names(axes: Any) -> tuple[str, ...]:
    """Return the names of the axes of a dim: an entry of a spec is one, several or None."""
    return (axes,) if isinstance(axes, str) else axes or ()


def whole(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return `x` with the whole of it on every device."""
    return reshard(x, P()) if is_explicit() else x


def split_as(y: Shaped[Array, "..."], x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return `y` split as `x` is, where axes are explicit."""
    return reshard(y, P(*spec_of(x))) if is_explicit() else y


def place(x: Shaped[Array, "..."], mesh: Mesh, spec: P) -> Shaped[Array, "..."]:
    """Return `x` split by `spec`."""
    if is_explicit():
        return reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def keeps_split(fn: Callable[..., Array], dims: int = 1) -> Callable[..., Array]:
    """Return `fn`, inside of which the compiler places arrays; its result is split as `x` is.

    Args:
        fn: a function of an array `x` and of others, to an array with the same first `dims`.
    """

    @functools.wraps(fn)
    def call(x: Array, *others: Any, **named: Any) -> Array:
        return by_compiler(fn, lambda: P(*spec_of(x)[:dims]), x, *others, **named)

    return call


def by_compiler(fn: Callable[..., Any], out: Callable[[], P], *args: Any, **named: Any) -> Any:
    """Return `fn(*args)`, inside of which the compiler places arrays.

    Args:
        out: returns the split of the results, where axes are explicit.
    """
    if not is_explicit():
        return fn(*args, **named)
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def inside(*arrays: Array) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        return fn(*jax.tree.unflatten(tree, list(given.values())), **named)

    auto = jax.sharding.auto_axes(inside, out_sharding=out())
    return auto(*(leaves[i] for i in places))


def split_of_product(
    rows: Float[Array, "*b i"], kernel: Float[Array, "..."], dim: int
) -> tuple[Float[Array, "*b i"], P | None]:
    """Return the rows, and the split of their product over the last dim and `dim` of a matrix.

    The product is split as the rows and the outputs are: rows that are split over the axes of the
    outputs are gathered over these. None: the compiler's.
    """
    if not is_explicit():
        return rows, None
    *first, last = spec_of(rows)
    outputs = spec_of(kernel)[1 - dim]
    free = [without(axes, outputs) for axes in first]
    return reshard(rows, P(*free, last)), P(*free, outputs)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Unchanged:
    """The place of a leaf of `extra` that a loss returns as it was: it is known by its identity."""

    leaf: int


def over_explicit_axes(
    loss: LossFn | Stateful, mesh: Mesh, rows: P, specs: OfLeaves, stacked: OfLeaves
) -> LossFn | Stateful:
    """Return `loss`, traced with all axes of the mesh explicit (`jax.sharding.AxisType`).

    Its arguments come with their split in their types: a batch by its rows, weights by the axes of
    their dims, the key on every device. Weights that the axis `fsdp` splits are gathered as the
    loss begins, those of stacked layers one layer after the other (`gather_layer`). What is
    gathered is not saved for the backward pass, which gathers it again.

    Args:
        specs: the split of parameters, and of `extra`, that the step passes.
        stacked: whether a leaf stacks the weights of layers.
    """
    auto = mesh.abstract_mesh
    explicit = auto.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Explicit))
    inner: Any = loss.loss if isinstance(loss, Stateful) else loss
    policy = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)
    each = lambda tree, spec: jax.tree.map(lambda x: reshard(x, spec), tree)

    def traced(*given: Any) -> Any:
        *weights, batch, rng = given  # parameters, and `extra` if the loss has one
        split, stacks = specs(weights), stacked(weights)

        def call(weights: Any, batch: Any, rng: Any) -> Any:
            begin = lambda x, stack: x if stack and spec_of(x)[0] is None else _gathered(x)
            params, *extra = jax.tree.map(begin, weights, stacks)
            numbers = {id(x): i for i, x in enumerate(jax.tree.leaves(extra))}
            kept = lambda x: _Unchanged(numbers[id(x)]) if id(x) in numbers else x
            return jax.tree.map(kept, inner(params, *extra, batch, rng))

        leaves = jax.tree.leaves(split, is_leaf=lambda x: isinstance(x, P))
        gathers = any(SPLIT in names(axes) for spec in leaves for axes in spec)
        call = jax.checkpoint(call, policy=policy) if gathers else call
        with use_abstract_mesh(explicit):
            result = call(jax.tree.map(reshard, weights, split), each(batch, rows), each(rng, P()))
        old, is_old = jax.tree.leaves(given[1:-2]), lambda x: isinstance(x, _Unchanged)
        with use_abstract_mesh(auto):
            back = lambda x: old[x.leaf] if is_old(x) else reshard(x, P())
            return jax.tree.map(back, result, is_leaf=is_old)

    return Stateful(traced) if isinstance(loss, Stateful) else traced


def gather_layer(weights: Params) -> Params:
    """Return the weights of one layer of a stack, gathered over `fsdp`, where axes are explicit."""
    return jax.tree.map(_gathered, weights) if is_explicit() else weights


def _gathered(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    kept = P(*(without(axes, SPLIT) for axes in spec_of(x)))
    return x if kept == P(*spec_of(x)) else checkpoint_name(reshard(x, kept), GATHERED)
