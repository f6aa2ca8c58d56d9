"""FLOPs of a traced function: its matrix products, convolutions and attention kernels."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.jaxpr import inner_jaxprs, is_opaque, scan_sizes
from jtrain.core.types import Params

# Products of a fused attention kernel, each of queries x keys x head size, by the kernel's name.
# A backward kernel computes the scores again (Dao et al. 2022, "FlashAttention", algorithm 4).
_ATTENTION = {
    **{"dot_product_attention_fwd": 2, "dot_product_attention_bwd": 5},  # cuDNN's
    **{"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4},
}


def count_flops(fn: Callable[..., Any], *args: Any, lower_bound: bool = False) -> float | None:
    """Count multiplications and additions in the products of `fn(*args)`; None where unknown.

    The body of a scan counts once for each iteration (XLA's own count takes it once), of a cond the
    most expensive branch counts, and recomputation in the backward pass counts again. None if a
    product is inside a while_loop, or if the function calls a kernel that is not in this file.
    Nothing is run; arguments may be shapes.

    Args:
        lower_bound: count one turn of a while_loop, and nothing for such a kernel.
    """
    return _jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr, lower_bound)


def product_flops(eqn: Any, lower_bound: bool = False) -> float | None:
    """Return the FLOPs of an equation that is a product, and 0 for any other.

    An attention kernel counts all pairs of a query and a key, also those that its mask hides.
    """
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
    if not is_opaque(name):
        return 0.0
    flops = _attention_flops(eqn)
    return 0.0 if flops is None and lower_bound else flops


def attention_products(name: str) -> int | None:
    """Return the products in a fused attention kernel of this name; None for another kernel."""
    return next((n for kernel, n in _ATTENTION.items() if kernel in name), None)


def _attention_flops(eqn: Any) -> float | None:
    """Return the FLOPs of a fused attention kernel; None for another kernel."""
    name = f"{eqn.params.get('name', '')} {eqn.primitive.name}"
    products = attention_products(name)
    if products is None:
        return None
    q, k = [x.aval for x in eqn.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)][:2]
    is_b_t_h_k = "dot_product_attention" in name and not eqn.params.get("layout", 0)
    return 2.0 * products * q.size * k.shape[1 if is_b_t_h_k else -2]


def _jaxpr_flops(jaxpr: Any, lower_bound: bool) -> float | None:
    return _sum_or_none(_equation_flops(eqn, lower_bound) for eqn in jaxpr.eqns)


def _equation_flops(eqn: Any, lower_bound: bool) -> float | None:
    own = product_flops(eqn, lower_bound)
    if own != 0 or is_opaque(eqn.primitive.name):
        return own
    parts = [_jaxpr_flops(program, lower_bound) for program in inner_jaxprs(eqn)]
    if eqn.primitive.name == "cond":
        return None if None in parts else max((x for x in parts if x is not None), default=0.0)
    inner = _sum_or_none(parts)
    times = repetitions(eqn, lower_bound)
    return inner if not inner else None if times is None else inner * times


def repetitions(eqn: Any, lower_bound: bool = False) -> int | None:
    """Return how often the program of an equation runs; for a while_loop None, or at least 1."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        axes, sizes = params.get("manual_axes", ()), dict(params["mesh"].shape)
        return math.prod(sizes[axis] for axis in axes or sizes)
    return None if name == "while" and not lower_bound else 1


def _sum_or_none(parts: Any) -> float | None:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def count_model_flops(
    loss: Callable[..., Any], params: Params, *args: Any, lower_bound: bool = False
) -> float | None:
    """Count the FLOPs of `loss(params, *args)` and its gradient by `params`, without recomputation.

    Only the forward pass is read: a product costs itself once, and once more for each factor whose
    gradient is taken, since the derivative of `a @ b` by each factor is one product of the same
    size. Nothing is run; `params` and `args` may be shapes. A product of parameters whose result
    goes through a stop_gradient counts as if it did not.

    Args:
        lower_bound: count one turn of a while_loop, and nothing for a kernel that is not known.

    Returns:
        None where unknown: a product in a while_loop, or a kernel that is not in
        this file.

    Source: model FLOPs as in Chowdhery et al. 2022, "PaLM", appendix B.
    """
    jaxpr = jax.make_jaxpr(loss)(params, *args).jaxpr
    count = len(jax.tree.leaves(params))
    differentiated = [i < count and _has_gradient(x) for i, x in enumerate(jaxpr.invars)]
    return _walk(jaxpr, differentiated, lower_bound)[0]


def _walk(jaxpr: Any, inputs: Sequence[bool], least: bool) -> tuple[float | None, list[bool]]:
    """Return the FLOPs of a program, and which outputs depend on the differentiated inputs."""
    depends = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda atom: False if hasattr(atom, "val") else depends.get(atom, False)
    total: float | None = 0.0
    for eqn in jaxpr.eqns:
        flops, outputs = _equation(eqn, [read(x) for x in eqn.invars], least)
        total = None if total is None or flops is None else total + flops
        depends.update(zip(eqn.outvars, outputs, strict=True))
    return total, [read(x) for x in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[bool], least: bool) -> tuple[float | None, list[bool]]:
    name = eqn.primitive.name
    reached = any(inputs) and name != "stop_gradient"
    outputs = [reached and _has_gradient(x) for x in eqn.outvars]
    flops = product_flops(eqn, least)
    if flops is None or flops or is_opaque(name):
        # A kernel of attention holds a product of its inputs, and one with the scores of both.
        factors = 2 * any(inputs) if is_opaque(name) else sum(inputs[:2])
        return flops and flops * (1 + factors), outputs
    programs = inner_jaxprs(eqn)
    if name == "cond":
        branches = [_walk(branch, inputs[1:], least) for branch in programs]
        costs = [cost for cost, _ in branches]
        reached_by = [any(each) for each in zip(*(out for _, out in branches), strict=True)]
        return None if None in costs else max(x for x in costs if x is not None), reached_by
    if name == "scan":
        flops, outputs = _scan(eqn, programs[0], inputs, least)
    elif len(programs) == 1 and len(programs[0].invars) == len(inputs):
        flops, outputs = _walk(programs[0], inputs, least)
    else:  # a while_loop, or what holds several programs: each may get whatever comes in
        reached_all = lambda program: [any(inputs)] * len(program.invars)
        costs = [_walk(program, reached_all(program), least)[0] for program in programs]
        flops = None if None in costs else sum(x for x in costs if x is not None)
    times = repetitions(eqn, least)
    return flops if not flops else None if times is None else flops * times, outputs


def _scan(scan: Any, body: Any, inputs: list[bool], least: bool) -> tuple[float | None, list[bool]]:
    """Return the FLOPs of an iteration, at the fixed point of what the carry depends on."""
    consts, carry = scan_sizes(scan, body)
    while True:
        flops, outputs = _walk(body, inputs, least)
        before = inputs[consts : consts + carry]
        after = [a or b for a, b in zip(before, outputs, strict=False)]
        if after == before:
            return flops, outputs
        inputs = [*inputs[:consts], *after, *inputs[consts + carry :]]


def _has_gradient(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)
