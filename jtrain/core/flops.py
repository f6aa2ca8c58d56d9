"""Counts the work of a traced function: its matrix products and convolutions."""

import math
from collections.abc import Callable
from typing import Any

import jax

from jtrain.core.jaxpr import inner_jaxprs


def count_flops(fn: Callable[..., Any], *args: Any) -> float | None:
    """Count multiplications and additions in the products of `fn(*args)`; None where unknown.

    What stands in a scan counts as often as it runs (XLA's own count takes a loop's body once), of
    a choice the most expensive branch counts, and what is computed again in the backward pass
    counts again. Not known are products in a loop that runs until a condition holds, and those in a
    kernel. Nothing is run; arguments may be shapes.
    """
    return _of_program(jax.make_jaxpr(fn)(*args).jaxpr)


def _of_program(jaxpr: Any) -> float | None:
    return _sum(_of(eqn) for eqn in jaxpr.eqns)


def _of(eqn: Any) -> float | None:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        ((contracted, _), _) = params["dimension_numbers"]
        left, out = eqn.invars[0].aval, eqn.outvars[0].aval
        return 2.0 * out.size * math.prod(left.shape[i] for i in contracted)
    if name == "ragged_dot_general":
        dims = params["ragged_dot_dimension_numbers"]
        ((contracted, _), _) = dims.dot_dimension_numbers
        left, out = eqn.invars[0].aval, eqn.outvars[0].aval
        # Where rows are contracted, each adds to the one group of the outputs that is its own.
        groups = out.shape[0] if set(dims.lhs_ragged_dimensions) <= set(contracted) else 1
        return 2.0 * out.size / groups * math.prod(left.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
        taps = kernel.size / kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        # Between the values of a dilated input there are zeros, which no one multiplies.
        return 2.0 * out.size * taps / math.prod(params["lhs_dilation"])
    parts = [_of_program(program) for program in inner_jaxprs(eqn)]
    if name == "cond":
        return None if None in parts else max((x for x in parts if x is not None), default=0.0)
    whole = _sum(parts)
    if whole and name == "scan":
        return whole * params["length"]
    if whole and name == "shard_map":
        axes, sizes = params.get("manual_axes", ()), dict(params["mesh"].shape)
        return whole * math.prod(sizes[axis] for axis in axes or sizes)
    return None if (whole and name == "while") or name == "pallas_call" else whole


def _sum(parts: Any) -> float | None:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total
