"""Purity of a loss: side effects, traces that differ between calls, the loss without `jit`."""

import dataclasses
import random
from typing import Any

import jax
import numpy as np

from jtrain.core.interpret import DifferentProgramsError, literals, pair_equations
from jtrain.core.types import Batch
from jtrain.testing.case import LossCase
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import StepResult, compare_results
from jtrain.testing.float64 import unless_opaque
from jtrain.testing.report import SINGLE, Comparison, is_finite
from jtrain.testing.row_sums import CompiledRowSums, add_sums

SEEDS = 4  # seeds of Python's `random` to try if a call drew from it


def explain_impurity(case: LossCase) -> Cause | None:
    """Return why a loss is not a pure function of its arguments; None if no reason is found.

    The loss is traced once more; the side effects of earlier calls are already recorded.
    """
    effects = case.side_effects
    if effects.changed:
        return cause("changes its arguments", changed=", ".join(sorted(effects.changed)))
    sources = set(effects.drew_from)
    if "random" in sources and not _depends_on_random(case):
        sources.remove("random")
    if sources:
        return cause("draws of the host", sources=" and ".join(sorted(sources)))
    if not is_same_program(case.trace.program, case.traced().program):
        return cause("not a function")
    if effects.asked and _depends_on_host(case):
        return cause("numbers of the host", asked=" and ".join(sorted(effects.asked)))
    return None


def _depends_on_host(case: LossCase) -> bool:
    """Return whether the trace changes with the numbers of the host; a mesh of devices fails."""
    case.side_effects.shift = 1
    try:
        return not is_same_program(case.trace.program, case.traced().program)
    except Exception:
        return False
    finally:
        case.side_effects.shift = 0


def _depends_on_random(case: LossCase) -> bool:
    """Return whether the trace changes with the seed of Python's `random`.

    Libraries draw from it without effect on the trace: beartype chooses the list items to check.
    """
    state = random.getstate()
    try:
        for seed in range(SEEDS):
            random.seed(seed)
            if not is_same_program(case.trace.program, case.traced().program):
                return True
    finally:
        random.setstate(state)
    return False


def is_same_program(one: Any, other: Any) -> bool:
    """Return whether two traced programs have the same operations on the same constants."""
    shapes = lambda equation: [x.aval.str_short() for x in equation.outvars]
    try:
        pairs = list(pair_equations(one, other))
    except DifferentProgramsError:
        return False
    constants = literals(one), literals(other)
    return (
        all(shapes(a) == shapes(b) for _, a, b in pairs)
        and len(constants[0]) == len(constants[1])
        and all(map(_same_value, *constants))
    )


def _same_value(a: Any, b: Any) -> bool:
    if a is None or b is None or a is b:  # None for what is no constant
        return a is b
    if any(
        jax.numpy.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key) for x in (a, b)
    ):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind in "fc")


# An eager loss may be so many times further from float64 than the compiled one: it stores what
# fusions keep in registers, and sums in another order.
TIMES = 8


def compare_eager(rows: CompiledRowSums, double: CompiledRowSums) -> Comparison:
    """Compare the eager loss of half of the rows with the compiled one.

    Half, because other comparisons compile for the same number of rows. If both differ by more
    than float32's tolerance, each is compared with float64.
    """
    case, batch = rows.case, rows.case.half_batch
    eager_result, compiled = _eager(rows, batch), _compiled(rows, batch)
    off = compare_results(eager_result, compiled)
    if off.largest <= SINGLE:
        return Comparison("eager", "ok", off)
    exact = unless_opaque(lambda: _compiled(double, batch))
    if exact is not None and is_finite(eager_result) == is_finite(compiled):
        allowed = max(SINGLE, TIMES * compare_results(compiled, exact).largest)
        if compare_results(eager_result, exact).largest <= allowed:
            return Comparison("eager", "rounding", off)
    if (found := explain_impurity(case)) is None:
        again = compare_results(_eager(rows, batch), _eager(rows, batch)).largest > 0
        found = cause("not a function" if again else "another program under jit")
    return Comparison.explained("eager", found, off)


def _eager(rows: CompiledRowSums, batch: Batch) -> StepResult:
    with jax.disable_jit():
        return _compiled(dataclasses.replace(rows, programs={}), batch)


def _compiled(rows: CompiledRowSums, batch: Batch) -> StepResult:
    return add_sums([rows(batch)], rows.case)
