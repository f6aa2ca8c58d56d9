"""Whether a loss is a pure function: a program that is the same each time that it is traced."""

import random
from typing import Any

import jax
import numpy as np

from jtrain.core.jaxpr import inner_jaxprs
from jtrain.testing.case import LossCase
from jtrain.testing.cause import Cause

SEEDS = 4  # of Python's `random`, where something drew from it
NOT_A_FUNCTION = Cause(
    "not a function",
    "called twice with the same arguments the loss gives two results: it draws from elsewhere than "
    "its key (a generator, the clock) or keeps something between calls (a counter, a list). Draw "
    "from rng, and hold what changes in `extra`.",
)


def cause_of_impurity(of: LossCase) -> Cause | None:
    """Return what makes a loss no pure function of its arguments; None if nothing is seen.

    It is traced once more, and what its calls did so far is known.
    """
    if of.watch.changed:
        return Cause(
            "changes its arguments",
            f"the loss changes what it is given: {', '.join(sorted(of.watch.changed))}. Whoever "
            f"called it holds the same dict, and the next call gets what this one left. Make a "
            f"new one: `batch = {{**batch, 'x': x}}`.",
        )
    sources = set(of.watch.drew_from)
    if "random" in sources and not _depends_on_random(of):
        sources.remove("random")
    if sources:
        return Cause(
            "draws of the host",
            f"the loss draws from {' and '.join(sorted(sources))}: what it draws while "
            f"it is traced is a constant of the compiled step, the same in each step, and another "
            f"one on each process. Draw from `rng` by jax.random, `jt.row_keys(rng, batch)` for "
            f"what each row gets.",
        )
    if not same_program(of.trace.program, of.traced().program):
        return NOT_A_FUNCTION
    return None


def _depends_on_random(of: LossCase) -> bool:
    """Whether the trace is another where Python's `random` draws other numbers.

    Libraries draw from it for themselves: beartype, to choose the items of a list that it checks.
    """
    state = random.getstate()
    try:
        for seed in range(SEEDS):
            random.seed(seed)
            if not same_program(of.trace.program, of.traced().program):
                return True
    finally:
        random.setstate(state)
    return False


def same_program(one: Any, other: Any) -> bool:
    """Whether two traced programs hold the same operations on the same constants."""
    constants = zip(getattr(one, "consts", ()), getattr(other, "consts", ()), strict=False)
    if not all(_same_value(a, b) for a, b in constants):
        return False
    one, other = getattr(one, "jaxpr", one), getattr(other, "jaxpr", other)
    if len(one.eqns) != len(other.eqns):
        return False
    return all(map(_same_equation, one.eqns, other.eqns))


def _same_equation(one: Any, other: Any) -> bool:
    if one.primitive.name != other.primitive.name or len(one.invars) != len(other.invars):
        return False
    for a, b in zip(one.invars, other.invars, strict=True):
        if hasattr(a, "val") != hasattr(b, "val"):
            return False
        if hasattr(a, "val") and not _same_value(a.val, b.val):
            return False
    shapes = [[x.aval.str_short() for x in e.outvars] for e in (one, other)]
    programs = inner_jaxprs(one), inner_jaxprs(other)
    return (
        shapes[0] == shapes[1]
        and len(programs[0]) == len(programs[1])
        and all(map(same_program, *programs))
    )


def _same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if any(
        jax.numpy.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key) for x in (a, b)
    ):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind in "fc")
