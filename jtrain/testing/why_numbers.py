"""Diagnosis of overflow, narrow sums and nonfinite values: the operation and its line."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import named_means
from jtrain.core.types import Batch
from jtrain.inspect.debug.eval_jaxpr import ExecutedOp, execute
from jtrain.inspect.debug.nonfinite_origin import NonfiniteOp, NonfiniteTrace
from jtrain.inspect.debug.source import find_source
from jtrain.testing.causes import Cause, cause
from jtrain.testing.float64 import COUNTING, ReplayRules, replay_equation
from jtrain.testing.flow import RowCoupling
from jtrain.testing.row_sums import CompiledRowSums, make_sums_of_terms
from jtrain.testing.splits import SumSplit
from jtrain.testing.trials import Trials

HALF = {"float16": "65,504, to 3 digits", "bfloat16": "3e38, to 2 digits"}


def explain_nonfinite(rows: CompiledRowSums, batch: Batch) -> Cause | None:
    """Return which operation makes an infinity or a NaN from finite inputs, in float32.

    The result is None if the loss and its gradient are finite when operations run one by one.
    """
    case, names, terms = rows.case, [], rows.case.terms()

    def numbers(params: Any, extra: Any, batch: Any, rng: Any) -> list[Any]:
        weights = [mean.weight for mean in terms(params, extra, batch, rng).terms.means]
        returned, gradient = make_sums_of_terms(terms)(weights, params, extra, batch, rng)
        found = [(n, x) for n, m in named_means(returned).items() for x in (m.total, m.weight)]
        found += [("the gradient", x) for x in jax.tree.leaves(gradient)]
        names.extend(name for name, _ in found)
        return [x for _, x in found]

    args = jax.tree.map(jnp.asarray, (rows.params, case.extra, dict(batch)))
    program = jax.make_jaxpr(numbers)(*args, rows.key)
    trace = NonfiniteTrace(program, [*jax.tree.leaves(args), rows.key])
    for name, output in zip(names, trace.outputs, strict=True):
        if not trace.broken(output):
            continue
        origins = [origin for origin in trace.origins(output) if isinstance(origin, NonfiniteOp)]
        if not origins:
            return cause("not finite (inputs)", name=name)
        origin = origins[0]
        operation = f"{origin.what}{_at(origin.equation, origin.calls)}"
        if origin.dtype in HALF:
            limit = HALF[origin.dtype]
            return cause(
                "overflow", name=name, operation=operation, dtype=origin.dtype, limit=limit
            )
        return cause("not finite", name=name, operation=operation)
    return None


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
    return cause("overflow (integers)", where=where)


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
    operation = f"{where.operation}{f' at {where.line}' if where.line else ''}"
    if kind == "whole":
        return cause("overflow (whole)", name=name, dtype=where.dtype, operation=operation)
    limit = HALF.get(where.dtype, "few")
    return cause("narrow sum", name=name, dtype=where.dtype, operation=operation, limit=limit)
