"""Explicit mesh axes, over which each array has its split in its type.

Over such axes JAX refuses an operation that would move an array, or whose result could be split in
more than one way: an unintended exchange is an error in place of a gather that nobody notices.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from jtrain.core.loss import Stateful
from jtrain.core.types import LossFn
from jtrain.parallel.rules import SPLIT

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


def replicated(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return `x` with the whole of it on every device."""
    return reshard(x, P()) if is_explicit() else x


def reshard_like(y: Shaped[Array, "..."], x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return `y` split as `x` is, where axes are explicit."""
    return reshard(y, P(*spec_of(x))) if is_explicit() else y


def constrained(x: Shaped[Array, "..."], mesh: Mesh, spec: P) -> Shaped[Array, "..."]:
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
        if not is_explicit():
            return fn(x, *others, **named)
        return by_compiler(fn, P(*spec_of(x)[:dims]), x, *others, **named)

    return call


def by_compiler(fn: Callable[..., Any], out: P, *args: Any, **named: Any) -> Any:
    """Return `fn(*args)`, inside of which the compiler places arrays.

    Args:
        out: the split of the results, where axes are explicit.
    """
    if not is_explicit():
        return fn(*args, **named)
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def inside(*arrays: Array) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        return fn(*jax.tree.unflatten(tree, list(given.values())), **named)

    auto = jax.sharding.auto_axes(inside, out_sharding=out)
    return auto(*(leaves[i] for i in places))


def product(
    rows: Float[Array, "*b i"], kernel: Float[Array, "..."], dim: int
) -> Float[Array, "*b o"]:
    """Return the product of rows and a matrix over its `dim`, the inputs: i o, or o i.

    Over explicit axes it is split as the rows and the outputs are: rows that are split over the
    axes of the outputs are gathered over these. A matrix that `fsdp` splits is gathered, in the
    backward pass again, and its gradient is summed into its split. Then reverse mode alone.
    """
    if is_explicit():
        return _product(dim, rows, kernel)
    return jax.lax.dot_general(rows, kernel, (((rows.ndim - 1,), (dim,)), ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dim, rows, kernel):
    kernel = gathered(kernel)
    *first, last = spec_of(rows)
    outputs = spec_of(kernel)[1 - dim]
    free = [without(axes, outputs) for axes in first]
    rows = reshard(rows, P(*free, last))
    return _dot(rows, kernel, [rows.ndim - 1], [dim], P(*free, outputs))


def _product_forward(dim, rows, kernel):
    return _product(dim, rows, kernel), (rows, kernel)


def _product_backward(dim, saved, grad):
    rows, kernel = saved
    full, split = gathered(kernel), spec_of(kernel)
    *free, _ = spec_of(grad)
    inputs = spec_of(full)[dim]
    of_rows = _dot(grad, full, [grad.ndim - 1], [1 - dim], P(*free, inputs))
    rows = reshard(rows, P(*free, spec_of(rows)[-1]))
    pair = (rows, grad) if dim == 0 else (grad, rows)
    every = [*range(grad.ndim - 1)]
    return reshard(of_rows, P(*spec_of(saved[0]))), _dot(*pair, every, every, P(*split))


_product.defvjp(_product_forward, _product_backward)


def _dot(x: Array, y: Array, of_x: list[int], of_y: list[int], split: P) -> Array:
    return jax.lax.dot_general(x, y, ((of_x, of_y), ((), ())), out_sharding=split)


def over_explicit_axes(
    loss: LossFn | Stateful, mesh: Mesh, rows: P, specs: OfLeaves, matrices: OfLeaves
) -> LossFn | Stateful:
    """Return `loss`, traced with all axes of the mesh explicit (`jax.sharding.AxisType`).

    Its arguments come with their split in their types: a batch by its rows, weights by the axes of
    their dims, the key on every device. Weights that the axis `fsdp` splits are gathered as the
    loss begins, but for those that the layers of a model gather where they use them.

    Args:
        specs: the split of parameters, and of `extra`, that the step passes.
        matrices: whether a leaf is for `product`, `keeps_split` or `gathered` to gather.
    """
    auto = mesh.abstract_mesh
    explicit = auto.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Explicit))
    inner: Any = loss.loss if isinstance(loss, Stateful) else loss
    reshard_all = lambda tree, spec: jax.tree.map(lambda x: reshard(x, spec), tree)

    def enter(x: Array, spec: P, is_matrix: bool) -> Array:
        x = reshard(x, spec)
        return x if is_matrix else gathered(x)

    def traced(*given: Any) -> Any:
        *weights, batch, rng = given  # parameters, and `extra` if the loss has one
        with use_abstract_mesh(explicit):
            params, *extra = jax.tree.map(enter, weights, specs(weights), matrices(weights))
            result = inner(params, *extra, reshard_all(batch, rows), reshard_all(rng, P()))
        # A leaf of `extra` that the loss returns as it was is known by its identity.
        pairs = zip(jax.tree.leaves(extra), jax.tree.leaves(weights[1:]), strict=True)
        unchanged = {id(new): old for new, old in pairs}

        def leave(x: Any) -> Any:
            if id(x) in unchanged:
                return unchanged[id(x)]
            return reshard(x, P()) if isinstance(x, jax.Array) else x

        with use_abstract_mesh(auto):
            return jax.tree.map(leave, result)

    return Stateful(traced) if isinstance(loss, Stateful) else traced


def gathered(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return weights whole over `fsdp`, where axes are explicit."""
    if not is_explicit():
        return x
    kept = P(*(without(axes, SPLIT) for axes in spec_of(x)))
    return x if kept == P(*spec_of(x)) else reshard(x, kept)
