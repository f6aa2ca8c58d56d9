"""Purity of a loss: side effects of its calls, and traces that differ between calls."""

import random
from typing import Any

import jax
import numpy as np

from jtrain.core.jaxpr import inner_jaxprs
from jtrain.testing.case import LossCase
from jtrain.testing.result import Cause

SEEDS = 4  # seeds of Python's `random` to try if a call drew from it
NOT_A_FUNCTION = Cause(
    "not a function",
    "called twice with the same arguments the loss gives two results: it draws from a source other "
    "than its key (a generator, the clock) or stores state between calls (a counter, a list). Draw "
    "from rng, and hold the state in `extra`.",
)


def explain_impurity(case: LossCase) -> Cause | None:
    """Return why a loss is not a pure function of its arguments; None if no reason is found.

    The loss is traced once more; the side effects of earlier calls are already recorded.
    """
    if case.side_effects.changed:
        return Cause(
            "changes its arguments",
            f"the loss changes its arguments: {', '.join(sorted(case.side_effects.changed))}. The "
            f"caller holds the same dict, so the next call gets the changed one. Make a new dict: "
            f"`batch = {{**batch, 'x': x}}`.",
        )
    sources = set(case.side_effects.drew_from)
    if "random" in sources and not _depends_on_random(case):
        sources.remove("random")
    if sources:
        return Cause(
            "draws of the host",
            f"the loss draws from {' and '.join(sorted(sources))}: a number drawn during tracing "
            f"is a constant of the compiled step, the same in each step and different on each "
            f"process. Draw from `rng` by jax.random, with `jt.row_keys(rng, batch)` for draws of "
            f"each row.",
        )
    if not is_same_program(case.trace.program, case.traced().program):
        return NOT_A_FUNCTION
    if case.side_effects.asked and _depends_on_host(case):
        return Cause(
            "numbers of the host",
            f"the loss computes with {' and '.join(sorted(case.side_effects.asked))}, another "
            f"number on another process. Take the number of rows from the batch, "
            f"`len(batch['mask'])`, and draws from `rng`.",
        )
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
    constants = zip(getattr(one, "consts", ()), getattr(other, "consts", ()), strict=False)
    if not all(_same_value(a, b) for a, b in constants):
        return False
    one, other = getattr(one, "jaxpr", one), getattr(other, "jaxpr", other)
    if len(one.eqns) != len(other.eqns) or not _same_literals(one.outvars, other.outvars):
        return False
    return all(map(_same_equation, one.eqns, other.eqns))


def _same_literals(one: Any, other: Any) -> bool:
    """Return whether two lists of atoms have the same constants at the same places."""
    found = [[getattr(atom, "val", None) for atom in atoms] for atoms in (one, other)]
    return len(one) == len(other) and all(
        (a is None) == (b is None) and (a is None or _same_value(a, b))
        for a, b in zip(*found, strict=True)
    )


def _same_equation(one: Any, other: Any) -> bool:
    if one.primitive.name != other.primitive.name or not _same_literals(one.invars, other.invars):
        return False
    shapes = [[x.aval.str_short() for x in e.outvars] for e in (one, other)]
    programs = inner_jaxprs(one), inner_jaxprs(other)
    return (
        shapes[0] == shapes[1]
        and len(programs[0]) == len(programs[1])
        and all(map(is_same_program, *programs))
    )


def _same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if any(
        jax.numpy.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key) for x in (a, b)
    ):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind in "fc")
