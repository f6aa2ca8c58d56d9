"""FLOPs of a traced function: its matrix products and convolutions."""

import math
from collections.abc import Callable
from typing import Any

import jax

from jtrain.core.jaxpr import inner_jaxprs, is_opaque


def count_flops(fn: Callable[..., Any], *args: Any) -> float | None:
    """Count multiplications and additions in the products of `fn(*args)`; None where unknown.

    The body of a scan counts once for each iteration (XLA's own count takes it once), of a cond the
    most expensive branch counts, and recomputation in the backward pass counts again. None if a
    product is inside a while_loop, or if the function calls a kernel (`is_opaque`).
    Nothing is run; arguments may be shapes.
    """
    return _jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _jaxpr_flops(jaxpr: Any) -> float | None:
    return _sum_or_none(_equation_flops(eqn) for eqn in jaxpr.eqns)


def _equation_flops(eqn: Any) -> float | None:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        ((contracted, _), _) = params["dimension_numbers"]
        left, out = eqn.invars[0].aval, eqn.outvars[0].aval
        return 2.0 * out.size * math.prod(left.shape[i] for i in contracted)
    if name == "ragged_dot_general":
        dims = params["ragged_dot_dimension_numbers"]
        ((contracted, _), _) = dims.dot_dimension_numbers
        left, out = eqn.invars[0].aval, eqn.outvars[0].aval
        # With a contracted ragged dim each row updates only its own group.
        groups = out.shape[0] if set(dims.lhs_ragged_dimensions) <= set(contracted) else 1
        return 2.0 * out.size / groups * math.prod(left.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
        taps = kernel.size / kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        # Between the values of a dilated input there are zeros, which are not multiplied.
        return 2.0 * out.size * taps / math.prod(params["lhs_dilation"])
    parts = [_jaxpr_flops(program) for program in inner_jaxprs(eqn)]
    if name == "cond":
        return None if None in parts else max((x for x in parts if x is not None), default=0.0)
    total = _sum_or_none(parts)
    if total and name == "scan":
        return total * params["length"]
    if total and name == "shard_map":
        axes, sizes = params.get("manual_axes", ()), dict(params["mesh"].shape)
        return total * math.prod(sizes[axis] for axis in axes or sizes)
    return None if (total and name == "while") or is_opaque(name) else total


def _sum_or_none(parts: Any) -> float | None:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total
