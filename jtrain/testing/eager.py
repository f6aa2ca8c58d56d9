"""A loss without `jit`, one operation after the other."""

import jax

from jtrain.core.types import Batch
from jtrain.testing.cause import Cause
from jtrain.testing.float64 import if_seen
from jtrain.testing.purity import NOT_A_FUNCTION, cause_of_impurity
from jtrain.testing.report import Comparison
from jtrain.testing.result import StepResult, distances
from jtrain.testing.row_sums import CompiledRowSums, added
from jtrain.testing.trials import Trials
from jtrain.testing.verdict import SINGLE, is_finite

# How many times further from float64 than the compiled loss an eager one may round: it stores what
# fusions keep, and sums in another order.
TIMES = 8


def eager(single: Trials, double: Trials) -> Comparison:
    """The loss of half of the rows, not compiled, against the compiled one.

    Half, for so many rows are compiled for other comparisons, too. Where they differ by more than
    float32 should, both are measured from float64.
    """
    of, rows = single.of, single.rows
    batch = of.few
    here, there = _eager(rows, batch), _compiled(rows, batch)
    near = distances(here, there)
    if near.largest <= SINGLE:
        return Comparison("eager", "ok", near)
    exact = if_seen(lambda: _compiled(double.rows, batch))
    if exact is not None and is_finite(here) == is_finite(there):
        allowed = max(SINGLE, TIMES * distances(there, exact).largest)
        if distances(here, exact).largest <= allowed:
            return Comparison("eager", "rounding", near)
    cause = cause_of_impurity(of) or _cause(rows, batch)
    return Comparison("eager", "FAILS", near, None, cause.why, cause.name)


def _cause(rows: CompiledRowSums, batch: Batch) -> Cause:
    """Why both differ."""
    first, second = _eager(rows, batch), _eager(rows, batch)
    if distances(first, second).largest > 0:
        return NOT_A_FUNCTION
    return Cause(
        "another program under jit",
        "the loss computes something else where it is traced: Python that asks for the values of "
        "arrays, or for whether they are traced.",
    )


def _eager(rows: CompiledRowSums, batch: Batch) -> StepResult:
    with jax.disable_jit():
        return _compiled(rows.anew(), batch)


def _compiled(rows: CompiledRowSums, batch: Batch) -> StepResult:
    return added([rows(batch)], rows.subject)
