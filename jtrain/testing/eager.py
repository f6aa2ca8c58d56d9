"""Comparison of a loss without `jit` with the compiled loss."""

import jax

from jtrain.core.types import Batch
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.purity import NOT_A_FUNCTION, explain_impurity
from jtrain.testing.report import Comparison
from jtrain.testing.result import Cause, StepResult, compare_results
from jtrain.testing.row_sums import CompiledRowSums, add_sums
from jtrain.testing.trials import Trials
from jtrain.testing.verdict import SINGLE, is_finite

# An eager loss may be so many times further from float64 than the compiled one: it stores what
# fusions keep in registers, and sums in another order.
TIMES = 8


def compare_eager(single: Trials, double: Trials) -> Comparison:
    """Compare the eager loss of half of the rows with the compiled one.

    Half, because other comparisons compile for the same number of rows. If both differ by more
    than float32's tolerance, each is compared with float64.
    """
    case, rows = single.case, single.rows
    batch = case.half_batch
    eager_result, compiled = _eager(rows, batch), _compiled(rows, batch)
    off = compare_results(eager_result, compiled)
    if off.largest <= SINGLE:
        return Comparison("eager", "ok", off)
    exact = unless_opaque(lambda: _compiled(double.rows, batch))
    if exact is not None and is_finite(eager_result) == is_finite(compiled):
        allowed = max(SINGLE, TIMES * compare_results(compiled, exact).largest)
        if compare_results(eager_result, exact).largest <= allowed:
            return Comparison("eager", "rounding", off)
    cause = explain_impurity(case) or _cause(rows, batch)
    return Comparison("eager", "FAILS", off, None, cause.why, cause.name)


def _cause(rows: CompiledRowSums, batch: Batch) -> Cause:
    """Return why the eager and the compiled loss differ."""
    first, second = _eager(rows, batch), _eager(rows, batch)
    if compare_results(first, second).largest > 0:
        return NOT_A_FUNCTION
    return Cause(
        "another program under jit",
        "the loss computes something else when it is traced: Python code that depends on the "
        "values of arrays, or on whether they are traced.",
    )


def _eager(rows: CompiledRowSums, batch: Batch) -> StepResult:
    with jax.disable_jit():
        return _compiled(rows.uncompiled(), batch)


def _compiled(rows: CompiledRowSums, batch: Batch) -> StepResult:
    return add_sums([rows(batch)], rows.case)
