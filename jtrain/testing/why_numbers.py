"""Which operation of a loss makes numbers that are too large, too narrow or no numbers at all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Batch, Key, Params
from jtrain.inspect.debug.eval_jaxpr import ExecutedOp, execute
from jtrain.inspect.debug.nonfinite_origin import NonfiniteOp, NonfiniteTrace
from jtrain.inspect.debug.source import written
from jtrain.testing.case import LossCase
from jtrain.testing.cause import Cause
from jtrain.testing.float64 import COUNTING, ReplayRules, done_again
from jtrain.testing.flow import RowCoupling
from jtrain.testing.row_flow import means
from jtrain.testing.row_sums import sums_of_terms
from jtrain.testing.splits import SumSplit
from jtrain.testing.trials import Trials

HALF = {"float16": "65,504, to 3 digits", "bfloat16": "3e38, to 2 digits"}


def cause_of_infinity(of: LossCase, batch: Batch, params: Params, key: Key) -> Cause | None:
    """Return which operation makes an infinity or a NaN of numbers that are none, in float32.

    None where the loss and its gradient are finite, one operation after the other.
    """
    names, terms = [], of.terms()

    def numbers(params: Any, extra: Any, batch: Any, rng: Any) -> list[Any]:
        weights = [mean.weight for mean in terms(params, extra, batch, rng).terms.means]
        returned, gradient = sums_of_terms(terms)(weights, params, extra, batch, rng)
        found = [(n, x) for n, m in means(returned).items() for x in (m.total, m.weight)]
        found += [("the gradient", x) for x in jax.tree.leaves(gradient)]
        names.extend(name for name, _ in found)
        return [x for _, x in found]

    given = jax.tree.map(jnp.asarray, (params, of.extra, dict(batch)))
    program = jax.make_jaxpr(numbers)(*given, key)
    blame = NonfiniteTrace(program, [*jax.tree.leaves(given), key])
    for name, output in zip(names, blame.outputs, strict=True):
        if not blame.broken(output):
            continue
        births = [birth for birth in blame.origins(output) if isinstance(birth, NonfiniteOp)]
        return _of_birth(name, births[0] if births else None)
    return None


def _of_birth(name: str, birth: NonfiniteOp | None) -> Cause:
    if birth is None:
        return Cause(
            "not finite",
            f"{name} is no finite number, because the parameters or the batch are not. Look at "
            f"what is read: `jtrain data show CONFIG`.",
        )
    at = _at(birth.equation, birth.calls)
    if birth.dtype in HALF:
        return Cause(
            "overflow",
            f"{name} is infinite: {birth.what}{at}, in {birth.dtype}, which holds numbers up to "
            f"{HALF[birth.dtype]}. A part of the batch stays below it, so that one device takes "
            f"the step and another skips it. Sum in float32: `values.astype(jnp.float32).sum()`.",
        )
    return Cause(
        "not finite",
        f"{name} is no finite number for the first batch: {birth.what}{at}. Every step would be "
        f"skipped, and there is nothing to compare. Keep what goes in there away from its end: "
        f"`jnp.where` before the function, an epsilon under a root.",
    )


def _at(equation: Any, calls: Any) -> str:
    lines = written(equation, calls)
    return f" at {lines[-1]}" if lines else ""


def cause_of_overflow(split: SumSplit, trials: Trials) -> Cause:
    """Return which operation on whole numbers goes beyond its type: with wider ones all is well."""
    of, rows = trials.of, trials.rows
    terms = of.terms()

    def totals(params: Any, extra: Any, batch: Any, rng: Any) -> list[Any]:
        found = means(terms(params, extra, batch, rng)).values()
        return [x for mean in found for x in (mean.total, mean.weight)]

    given = jax.tree.map(jnp.asarray, (rows.params, of.extra, dict(split.whole)))
    program = jax.make_jaxpr(totals)(*given, rows.key)
    where = "whole numbers overflow"
    for done in execute(program, [*jax.tree.leaves(given), rows.key]):
        if isinstance(done, ExecutedOp) and (said := _wraps(done)):
            where = f"{said}{_at(done.equation, done.calls)}"
            break
    return Cause(
        "overflow",
        f"{where}: with whole numbers of 64 bits in their place the parts add up. Sum weights and "
        f"counts as float32, `weights.astype(jnp.float32).sum()`.",
    )


def _wraps(done: ExecutedOp) -> str:
    """What went beyond the type of a result; empty if nothing."""
    output = done.outputs[0].array
    if output.dtype not in COUNTING:
        return ""
    with jax.enable_x64(True):
        rules = ReplayRules(floats=False, integers=True)
        wide = np.asarray(done_again(done.equation, [v.array for v in done.inputs], rules)[0])
    if np.array_equal(wide, np.asarray(output)):
        return ""
    worst = np.ravel(wide)[np.argmax(np.abs(np.ravel(wide)))]
    return f"{done.equation.primitive.name} gives {worst} in {output.dtype}, which cannot hold it"


def cause_of_few_bits(kind: str, name: str, where: RowCoupling) -> Cause:
    """A sum over rows in a type that many rows are too many for."""
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
        f"numbers up to {HALF.get(where.dtype, 'few')}: it rounds with every split otherwise, and "
        f"a count stands still. Sum in float32: `values.astype(jnp.float32).sum()`.",
    )
