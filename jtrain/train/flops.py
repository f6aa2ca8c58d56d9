"""FLOPs of a traced function: its matrix products, convolutions and attention kernels."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.interpret import (
    Equation,
    Interpreter,
    executions,
    is_opaque,
    place_of,
    repetitions,
)
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
    cost = lambda equation: _cost(equation, lower_bound)
    total = 0.0
    for equation, times, counted in executions(jax.make_jaxpr(fn)(*args), cost):
        if flops := cost(equation):
            total += flops * times if counted or lower_bound else math.inf
    return _finite(total)


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
    name = f"{eqn.params.get('name', '')} {eqn.primitive.name}"
    products = attention_products(name)
    if products is None:
        return None
    q, k = [x.aval for x in eqn.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)][:2]
    is_b_t_h_k = "dot_product_attention" in name and not eqn.params.get("layout", 0)
    return 2.0 * products * q.size * k.shape[1 if is_b_t_h_k else -2]


def _cost(equation: Equation, lower_bound: bool) -> float:
    """Return the FLOPs of a product; infinity where they are not known."""
    flops = product_flops(equation, lower_bound)
    return math.inf if flops is None else flops


def _finite(flops: float) -> float | None:
    return flops if math.isfinite(flops) else None


def count_model_flops(
    loss: Callable[..., Any], params: Params, *args: Any, lower_bound: bool = False
) -> float | None:
    """Count the FLOPs of `loss(params, *args)` and its gradient by `params`, without recomputation.

    Only the forward pass is read: a product costs itself once, and once more for each factor whose
    gradient is taken, since the derivative of `a @ b` by each factor is one product of the same
    size. Nothing is run; `params` and `args` may be shapes. A product of parameters whose result
    goes through a stop_gradient counts as if it did not. None as in `count_flops`.

    Args:
        lower_bound: count one turn of a while_loop, and nothing for a kernel that is not known.

    Source: model FLOPs as in Chowdhery et al. 2022, "PaLM", appendix B.
    """
    program = jax.make_jaxpr(loss)(params, *args)
    count = len(jax.tree.leaves(params))
    walk = _ModelFlops(lower_bound)
    walk.run(program, [i < count and _has_gradient(x) for i, x in enumerate(program.in_avals)])
    return _finite(sum(walk.costs.values()))


class _ModelFlops(Interpreter[bool]):
    """Values that depend on the differentiated inputs, and what each product costs with them."""

    def __init__(self, lower_bound: bool):
        self._lower_bound = lower_bound
        self.costs: dict[tuple[int, ...], float] = {}  # by place: a loop is evaluated several times

    def constant(self, value: Any, aval: Any) -> bool:
        return False

    def join(self, *values: bool) -> bool:
        return any(values)

    def operation(self, equation: Equation, inputs: list[bool]) -> Sequence[bool]:
        name, flops = equation.primitive.name, _cost(equation, self._lower_bound)
        # A kernel of attention holds a product of its inputs, and one with the scores of both.
        factors = 2 * any(inputs) if is_opaque(name) else sum(inputs[:2])
        if flops:
            times = [repetitions(call) for call in self.calls]
            known = self._lower_bound or None not in times
            runs = math.prod(1 if n is None else n for n in times) if known else math.inf
            self.costs[place_of(self.calls, equation)] = flops * (1 + factors) * runs
        reached = any(inputs) and name != "stop_gradient"
        return [reached and _has_gradient(x.aval) for x in equation.outvars]

    def cond(self, equation: Equation, index: bool, branches: Any) -> Sequence[bool]:
        inside = tuple(map(id, self.calls))
        others = {k: v for k, v in self.costs.items() if k[: len(inside)] != inside}
        found = []
        for branch in branches:
            self.costs = {}
            found.append((branch(), self.costs))
        self.costs = others | max((costs for _, costs in found), key=lambda x: sum(x.values()))
        return [any(values) for values in zip(*(outputs for outputs, _ in found), strict=True)]


def _has_gradient(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
