"""Causes for overflow, narrow sums and nonfinite values, with the operation and its line."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import named_means
from jtrain.core.types import Batch, Key, Params
from jtrain.inspect.debug.eval_jaxpr import ExecutedOp, execute
from jtrain.inspect.debug.nonfinite_origin import NonfiniteOp, NonfiniteTrace
from jtrain.inspect.debug.source import find_source
from jtrain.testing.case import LossCase
from jtrain.testing.float64 import COUNTING, ReplayRules, replay_equation
from jtrain.testing.flow import RowCoupling
from jtrain.testing.result import Cause
from jtrain.testing.row_sums import make_sums_of_terms
from jtrain.testing.splits import SumSplit
from jtrain.testing.trials import Trials

HALF = {"float16": "65,504, to 3 digits", "bfloat16": "3e38, to 2 digits"}


def explain_nonfinite(case: LossCase, batch: Batch, params: Params, key: Key) -> Cause | None:
    """Return which operation makes an infinity or a NaN from finite inputs, in float32.

    The result is None if the loss and its gradient are finite when operations run one by one.
    """
    names, terms = [], case.terms()

    def numbers(params: Any, extra: Any, batch: Any, rng: Any) -> list[Any]:
        weights = [mean.weight for mean in terms(params, extra, batch, rng).terms.means]
        returned, gradient = make_sums_of_terms(terms)(weights, params, extra, batch, rng)
        found = [(n, x) for n, m in named_means(returned).items() for x in (m.total, m.weight)]
        found += [("the gradient", x) for x in jax.tree.leaves(gradient)]
        names.extend(name for name, _ in found)
        return [x for _, x in found]

    args = jax.tree.map(jnp.asarray, (params, case.extra, dict(batch)))
    program = jax.make_jaxpr(numbers)(*args, key)
    trace = NonfiniteTrace(program, [*jax.tree.leaves(args), key])
    for name, output in zip(names, trace.outputs, strict=True):
        if not trace.broken(output):
            continue
        origins = [origin for origin in trace.origins(output) if isinstance(origin, NonfiniteOp)]
        return _explain_origin(name, origins[0] if origins else None)
    return None


def _explain_origin(name: str, origin: NonfiniteOp | None) -> Cause:
    if origin is None:
        return Cause(
            "not finite",
            f"{name} is not finite, because the parameters or the batch are not. Inspect the data: "
            f"`jtrain data show CONFIG`.",
        )
    at = _at(origin.equation, origin.calls)
    if origin.dtype in HALF:
        return Cause(
            "overflow",
            f"{name} is infinite: {origin.what}{at}, in {origin.dtype}, which holds numbers up to "
            f"{HALF[origin.dtype]}. A part of the batch stays below this limit, so one layout "
            f"takes the step and another skips it. Sum in float32: "
            f"`values.astype(jnp.float32).sum()`.",
        )
    return Cause(
        "not finite",
        f"{name} is not finite for the first batch: {origin.what}{at}. Every step would be "
        f"skipped, and there is nothing to compare. Keep the input of that operation inside its "
        f"domain: `jnp.where` before the function, an epsilon under a root.",
    )


def _at(equation: Any, calls: Any) -> str:
    lines = find_source(equation, calls)
    return f" at {lines[-1]}" if lines else ""


def explain_overflow(split: SumSplit, trials: Trials) -> Cause:
    """Return which integer operation overflows, once wider integers are known to add up."""
    case, rows = trials.case, trials.rows
    terms = case.terms()

    def totals(params: Any, extra: Any, batch: Any, rng: Any) -> list[Any]:
        found = named_means(terms(params, extra, batch, rng)).values()
        return [x for mean in found for x in (mean.total, mean.weight)]

    args = jax.tree.map(jnp.asarray, (rows.params, case.extra, dict(split.whole)))
    program = jax.make_jaxpr(totals)(*args, rows.key)
    where = "integers overflow"
    for executed in execute(program, [*jax.tree.leaves(args), rows.key]):
        if isinstance(executed, ExecutedOp) and (overflow := _describe_overflow(executed)):
            where = f"{overflow}{_at(executed.equation, executed.calls)}"
            break
    return Cause(
        "overflow",
        f"{where}: with 64-bit integers the parts add up. Sum weights and counts as float32, "
        f"`weights.astype(jnp.float32).sum()`.",
    )


def _describe_overflow(executed: ExecutedOp) -> str:
    """Return a description of the overflow in an operation; empty if there is none."""
    output = executed.outputs[0].array
    if output.dtype not in COUNTING:
        return ""
    with jax.enable_x64(True):
        rules = ReplayRules(floats=False, integers=True)
        wide = np.asarray(
            replay_equation(executed.equation, [v.array for v in executed.inputs], rules)[0]
        )
    if np.array_equal(wide, np.asarray(output)):
        return ""
    worst = np.ravel(wide)[np.argmax(np.abs(np.ravel(wide)))]
    return (
        f"{executed.equation.primitive.name} gives {worst} in {output.dtype}, which cannot hold it"
    )


def explain_few_bits(kind: str, name: str, where: RowCoupling) -> Cause:
    """Return the cause for a sum over rows in a type that is too narrow for many rows."""
    line = f" at {where.line}" if where.line else ""
    if kind == "whole":
        return Cause(
            "overflow",
            f"{name} is summed over rows in {where.dtype} ({where.operation}{line}), which a "
            f"larger batch overflows. Sum weights and counts as float32: "
            f"`weights.astype(jnp.float32).sum()`.",
        )
    return Cause(
        "narrow sum",
        f"{name} is summed over rows in {where.dtype} ({where.operation}{line}), which holds "
        f"numbers up to {HALF.get(where.dtype, 'few')}: it rounds differently with every split, "
        f"and a large count stops growing. Sum in float32: `values.astype(jnp.float32).sum()`.",
    )
