"""Verdicts of comparisons, with float64 deciding what float32 leaves open."""

from collections.abc import Callable

import numpy as np

from jtrain.testing.compare import named_arrays
from jtrain.testing.report import Comparison
from jtrain.testing.result import Cause, Distances, StepResult

# Relative tolerances. Adding some thousand numbers in another order moves the last of float32's
# 24 bits (6e-8) a few times, and the last of float64's 53 (1e-16) as often; a fault moves both
# results alike, so any float64 tolerance between 1e-12 and 1e-6 separates fault from rounding.
SINGLE, DOUBLE = 1e-6, 1e-12


def judge(
    check: str,
    single: Distances,
    double: Distances | None,
    explain: Callable[[], Cause],
    explain_rounding: Callable[[], Cause | None] = lambda: None,
) -> Comparison:
    """Return the comparison with its verdict.

    Args:
        check: name of the comparison.
        single: the distances in float32.
        double: the distances in float64, if known.
        explain: returns the cause; called if the comparison fails.
        explain_rounding: returns a cause if rounding cannot explain the difference; called if only
            float32 differs.
    """
    if is_far(single, double):
        cause = explain()
    elif single.largest <= SINGLE:
        return Comparison(check, "ok", single, double)
    elif (cause := explain_rounding()) is None:
        return Comparison(check, "rounding", single, double)
    return Comparison(
        check, "FAILS" if cause.fault else "named", single, double, cause.why, cause.name
    )


def is_far(single: Distances, double: Distances | None) -> bool:
    """Return whether two results differ by more than rounding, judged in float64 if known.

    Rounding is 5e8 times smaller in float64, also where large numbers cancel.
    """
    if double is None:
        return single.largest > SINGLE
    return double.largest > max(DOUBLE, 1e-7 * min(1.0, single.largest))


def is_finite(result: StepResult) -> bool:
    """Return whether loss, gradient and state are finite; a metric of no row may be NaN."""
    leaves = [*named_arrays(result.gradient).values(), *named_arrays(result.state).values()]
    return bool(
        np.isfinite(result.loss)
        and all(np.isfinite(x).all() for x in leaves if x.dtype.kind == "f")
    )
