"""Diagnosis of numbers that are not finite, overflow or round, with the operation and its line."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.interpret import equations_in
from jtrain.core.loss import named_means
from jtrain.core.types import Batch
from jtrain.inspect.debug.nonfinite import NonfiniteTrace
from jtrain.testing.case import LossCase
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import Distances, compare_results, relative_difference
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.flow import facts_of
from jtrain.testing.report import SINGLE
from jtrain.testing.sums import Sums, make_sums, perturb

CANCELLED = 1e-4  # relative error of a loss in float32, a thousand times that of a plain mean
ROUNDED = 1e-5  # the effect of a split in float32 is nearly always smaller
# A result may be so many times further from float64 than another of the same program: it stores
# what fusions keep in registers, and sums in another order.
TIMES = 8
DRAWS, NEAR = 8, 1e-5  # parameters at which rounding is measured, and how far apart they are
HALF = {"float16": "65,504, to 3 digits", "bfloat16": "3e38, to 2 digits"}


def explain_few_bits(case: LossCase, single: Sums, double: Sums, batch: Batch) -> Cause | None:
    """Return the cause if a sum over rows is wrong in a type of few bits, and right in float64."""
    facts = [(kind, *fact) for kind in ("whole", "narrow") for fact in facts_of(case, kind).items()]
    exact = unless_opaque(lambda: double.forward(batch)) if facts else None
    if exact is None:
        return None
    rounded = single.forward(batch)
    for kind, name, where in facts:
        pairs = zip(jax.tree.leaves(rounded[name]), jax.tree.leaves(exact[name]), strict=True)
        if max(relative_difference(*pair) for pair in pairs) > ROUNDED:
            about = {"name": name, "dtype": where.dtype, "operation": where.description}
            if kind == "whole":
                return cause("overflow (integers)", **about)
            return cause("narrow sum", **about, limit=HALF.get(where.dtype, "few"))
    return None


@functools.lru_cache(maxsize=4)
def measure_rounding(case: LossCase) -> float | None:
    """Return the largest error of loss and gradient in their own types; None if not known.

    Of several parameters beside those of the case, since one error may be small by chance.
    """
    each = Sums(case=case), Sums(case=case, double=True)

    def error(seed: int) -> float:
        params = perturb(case.params, seed, NEAR)
        one, other = (dataclasses.replace(sums, params=params).add([case.batch]) for sums in each)
        off = compare_results(one, other)
        return max(off.loss.by, off.gradient.by)

    return unless_opaque(lambda: max(map(error, range(DRAWS))))


def explain_rounding(case: LossCase, off: Distances) -> Cause | None:
    """Return a cause if rounding in the loss's own types does not explain a difference.

    Args:
        off: the distances of two results in float32, which are equal in float64.
    """
    worst = max(off.loss.by, off.gradient.by)
    if worst <= ROUNDED or (error := measure_rounding(case)) is None:
        return None
    allowed = TIMES * max(error, SINGLE)
    if worst > allowed:
        return cause("rounding", loss=off.loss.by, gradient=off.gradient.by, allowed=allowed)
    equations = equations_in(case.trace.program)
    dtypes = {str(getattr(x.aval, "dtype", "")) for e in equations for x in e.outvars}
    if off.loss.by <= CANCELLED or dtypes & HALF.keys():
        return None
    return cause("cancellation", loss=off.loss.by)


def explain_nonfinite(sums: Sums, batch: Batch) -> Cause:
    """Return which operation makes an infinity or a NaN from finite inputs, in float32."""
    case, names, terms = sums.case, [], sums.case.terms()

    def numbers(params: Any, extra: Any, batch: Any, rng: Any) -> list[Any]:
        weights = [mean.weight for mean in terms(params, extra, batch, rng).terms.means]
        returned, gradient = make_sums(terms)(weights, params, extra, batch, rng)
        found = [(n, x) for n, m in named_means(returned).items() for x in (m.total, m.weight)]
        found += [("the gradient", x) for x in jax.tree.leaves(gradient)]
        names.extend(name for name, _ in found)
        return [x for _, x in found]

    args = jax.tree.map(jnp.asarray, (sums.params, case.extra, dict(batch)))
    program = jax.make_jaxpr(numbers)(*args, sums.key)
    trace = NonfiniteTrace(program, [*jax.tree.leaves(args), sums.key])
    for name, output in zip(names, trace.outputs, strict=True):
        if not trace.broken(output):
            continue
        origins = [origin for origin in trace.origins(output) if origin.equation is not None]
        if not origins:
            return cause("not finite (inputs)", name=name)
        origin = origins[0]
        operation = origin.what + "".join(f" at {line}" for line in origin.lines[-1:])
        if origin.dtype in HALF:
            about = {"dtype": origin.dtype, "limit": HALF[origin.dtype]}
            return cause("overflow", name=name, operation=operation, **about)
        return cause("not finite", name=name, operation=operation)
    return cause("not finite (compiled)")
