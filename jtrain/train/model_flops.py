"""Model FLOPs: the products that a loss and its gradient need, whatever is computed twice.

`jtrain.train.flops` counts the products that a program runs, with those that the backward pass
computes again (remat, custom derivatives). Here only the forward pass is read: a product costs
itself once, and once more for each factor whose gradient is taken, since the derivative of `a @ b`
by each factor is one product of the same size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.jaxpr import inner_jaxprs, is_opaque, scan_sizes
from jtrain.core.types import Params
from jtrain.train.flops import product_flops, repetitions


def count_model_flops(
    loss: Callable[..., Any], params: Params, *args: Any, lower_bound: bool = False
) -> float | None:
    """Count the FLOPs of `loss(params, *args)` and its gradient by `params`, without recomputation.

    Nothing is run; `params` and `args` may be shapes. A product of parameters whose result goes
    through a stop_gradient counts as if it did not.

    Args:
        lower_bound: count one turn of a while_loop, and nothing for a kernel that is not known.

    Returns:
        None where unknown: a product in a while_loop, or a kernel that is not in
        `jtrain.train.flops`.

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
