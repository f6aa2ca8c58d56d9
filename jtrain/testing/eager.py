"""A loss without `jit`, one operation after the other."""

import jax
import numpy as np

from jtrain.testing.report import Row
from jtrain.testing.result import Result, distances
from jtrain.testing.splits import taken
from jtrain.testing.sums import OfRows, added
from jtrain.testing.verdict import SINGLE
from jtrain.testing.why_rows import Cause
from jtrain.testing.widened import if_seen

# How many times further from float64 than the compiled loss an eager one may round: it stores what
# fusions keep, and sums in another order.
TIMES = 8


def eager(single: OfRows, double: OfRows) -> Row:
    """The loss of half of the rows, not compiled, against the compiled one.

    Half, for so many rows are compiled for other comparisons, too. Where they differ by more than
    float32 should, both are measured from float64.
    """
    here, there = _eager(single), _compiled(single)
    near = distances(here, there)
    if near.largest <= SINGLE:
        return Row("eager", "ok", near)
    exact = if_seen(lambda: _compiled(double))
    if exact is not None:
        allowed = max(SINGLE, TIMES * distances(there, exact).largest)
        if distances(here, exact).largest <= allowed:
            return Row("eager", "rounding", near)
    cause = _cause(single)
    return Row("eager", "FAILS", near, None, cause.why, cause.name)


def _cause(rows: OfRows) -> Cause:
    """Why both differ."""
    first, second = _eager(rows), _eager(rows)
    if distances(first, second).largest > 0:
        return Cause(
            "not a function",
            "called twice with the same arguments the loss gives two results: it draws from "
            "elsewhere than its key (numpy, random, time) or keeps something between calls. Draw "
            "from rng, and hold what changes in `extra`.",
        )
    return Cause(
        "another program under jit",
        "the loss computes something else where it is traced: Python that asks for the values of "
        "arrays, or for whether they are traced.",
    )


def _eager(rows: OfRows) -> Result:
    with jax.disable_jit():
        return _compiled(OfRows(rows.subject, double=rows.double, draws=rows.draws))


def _compiled(rows: OfRows) -> Result:
    of = rows.subject
    return added([rows(taken(of.batch, np.arange(of.rows // 2)))], of)
