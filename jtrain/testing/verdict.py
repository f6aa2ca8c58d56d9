"""The verdict of a comparison, float64 deciding what float32 leaves open."""

from collections.abc import Callable

import numpy as np

from jtrain.testing.cause import Cause
from jtrain.testing.compare import numbers
from jtrain.testing.report import Comparison
from jtrain.testing.result import Distances, StepResult

# What is allowed, relative. Adding some thousand numbers in another order moves the last of
# float32's 24 bits (6e-8) a few times, and the last of float64's 53 (1e-16) as often; a fault moves
# both alike, so that anything between 1e-12 and 1e-6 tells them apart.
SINGLE, DOUBLE = 1e-6, 1e-12


def judged(
    check: str,
    single: Distances,
    double: Distances | None,
    why: Callable[[], Cause],
    rounds: Callable[[], Cause | None] = lambda: None,
) -> Comparison:
    """The row of a comparison.

    Args:
        check: its name.
        single: the distances in float32.
        double: those in float64, if they are known.
        why: is asked where it fails.
        rounds: is asked where float32 is off and float64 is not: why it is no rounding, if so.
    """
    if is_far(single, double):
        cause = why()
    elif single.largest <= SINGLE:
        return Comparison(check, "ok", single, double)
    elif (cause := rounds()) is None:
        return Comparison(check, "rounding", single, double)
    return Comparison(
        check, "FAILS" if cause.fault else "named", single, double, cause.why, cause.name
    )


def is_far(single: Distances, double: Distances | None) -> bool:
    """Whether two results are further apart than rounding puts them: in float64 if it is known."""
    return single.largest > SINGLE if double is None else double.largest > DOUBLE


def is_finite(result: StepResult) -> bool:
    """Whether loss, gradient and state hold numbers alone; a metric of no row may be NaN."""
    leaves = [*numbers(result.gradient).values(), *numbers(result.state).values()]
    return bool(
        np.isfinite(result.loss)
        and all(np.isfinite(x).all() for x in leaves if x.dtype.kind == "f")
    )
