"""Max pools of other libraries' modules, in the form that is fast on a CPU."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from jtrain.core.interpret import (
    Equation,
    as_function,
    bind,
    is_opaque,
    pair_equations,
    place_of,
    replace_equation,
    replace_equations,
)
from jtrain.models.layers.convolution import max_along
from jtrain.parallel.explicit import is_explicit


def fast_pools(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose traced max pools have a gradient that is fast on a CPU.

    XLA:CPU takes five times as long for the gradient of `reduce_window` as for that of maxima of
    slices, which are the same bits; so are their gradients where windows do not overlap. Programs
    for other platforms are as they were. A call with concrete arrays is not traced, so that a
    module can be debugged.
    """
    plain: set[Any] = set()  # signatures of calls without a pool: not traced twice

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        tracers = (leaves[i] for i in places if isinstance(leaves[i], Tracer))
        traced = any(x.to_concrete_value() is None for x in tracers)
        # A copy of a program over explicit axes would not have the splits of its operations.
        traced = traced and jax.default_backend() == "cpu" and not is_explicit()
        signature = (structure, *map(_signature, leaves))
        if not traced or signature in plain:
            return function(*args, **kwargs)
        results: list[Any] = []

        def flat(*arrays: Array) -> list[Array]:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(structure, filled.values())
            results[:] = jax.tree.flatten(function(*args, **kwargs))
            return [leaf for leaf in results[0] if isinstance(leaf, jax.Array)]

        arrays = [leaves[i] for i in places]
        program = jax.make_jaxpr(flat)(*arrays)
        replacements = {
            place_of(calls, equation): replace_equation(equation, faster)
            for calls, equation, _ in pair_equations(program, program)
            if (faster := _faster(equation))
            and not any(is_opaque(outer.primitive.name) for outer in calls)
        }
        if not replacements:
            plain.add(signature)
        computed = as_function(replace_equations(program, replacements))(*arrays)
        # A constant comes back as a number.
        outputs = map(jnp.asarray, computed, (aval.dtype for aval in program.out_avals))
        leaves_out, structure_out = results
        out = [next(outputs) if isinstance(leaf, jax.Array) else leaf for leaf in leaves_out]
        return jax.tree.unflatten(structure_out, out)

    return call


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.typeof(leaf)
    return leaf if isinstance(leaf, Hashable) else type(leaf)


def _faster(equation: Equation) -> Callable[..., Any] | None:
    """Return a function that computes a max pool faster on a CPU; None for other equations."""
    params = equation.params
    if equation.primitive.name != "reduce_window_max":
        return None
    names = ("window_dimensions", "window_strides", "padding")
    by_dim = enumerate(zip(*(params[name] for name in names), strict=True))
    pools = [(dim, *pool) for dim, pool in by_dim if pool != (1, 1, (0, 0))]
    covered = (
        jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)
        and {*params["base_dilation"], *params["window_dilation"]} == {1}
        and all(0 <= zeros < size for _, size, _, sides in pools for zeros in sides)
    )
    on_cpu = functools.partial(_max_pool, pools=pools)
    as_it_is = lambda *inputs: bind(equation, inputs)[0]
    platforms = functools.partial(jax.lax.platform_dependent, cpu=on_cpu, default=as_it_is)
    return platforms if covered else None


def _max_pool(x: Array, pools: Sequence[tuple[int, int, int, tuple[int, int]]]) -> Array:
    """Return the maxima of windows, given as (dim, window, stride, padding).

    The last dim is pooled first, so the gradient of a window goes to its first maximum, row by row,
    as in XLA's `select_and_scatter`.
    """
    for dim, window, stride, padding in reversed(pools):
        # A barrier: fused into one pass, each maximum would be computed several times.
        x = max_along(jax.lax.optimization_barrier(x), dim, window, stride, padding, _first_max)
    return x


@jax.custom_jvp
def _first_max(a: Array, b: Array) -> Array:
    """Return the maximum, whose gradient goes to `a` where both are equal."""
    return jnp.maximum(a, b)


@_first_max.defjvp
def _first_max_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]):
    return _first_max(*primals), jnp.where(primals[0] >= primals[1], *tangents)
