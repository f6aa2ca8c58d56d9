"""Purity of a loss: side effects, traces that differ between calls, the loss without `jit`."""

import random
from typing import Any

import jax
import numpy as np

from jtrain.core.interpret import DifferentProgramsError, literals, pair_equations
from jtrain.testing.case import LossCase
from jtrain.testing.causes import Cause, cause

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
    if not _traces_again(case):
        return cause("not a function")
    if effects.asked and _depends_on_host(case):
        return cause("numbers of the host", asked=" and ".join(sorted(effects.asked)))
    return None


def _depends_on_host(case: LossCase) -> bool:
    """Return whether the trace changes with the numbers of the host; a mesh of devices fails."""
    case.side_effects.shift = 1
    try:
        return not _traces_again(case)
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
            if not _traces_again(case):
                return True
    finally:
        random.setstate(state)
    return False


def _traces_again(case: LossCase) -> bool:
    one, other = case.trace.program, case.traced().program
    shapes = lambda equation: [x.aval.str_short() for x in equation.outvars]
    try:
        same = all(shapes(a) == shapes(b) for _, a, b in pair_equations(one, other))
    except DifferentProgramsError:
        return False
    constants = literals(one), literals(other)
    return same and len(constants[0]) == len(constants[1]) and all(map(_same_value, *constants))


def _same_value(a: Any, b: Any) -> bool:
    if a is None or b is None or a is b:  # None for what is not a constant
        return a is b
    is_key = lambda x: jax.numpy.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
    a, b = (np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in (a, b))
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
