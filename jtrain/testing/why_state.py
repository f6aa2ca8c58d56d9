"""Causes for a wrong next state after a right loss and gradient."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from jtrain.testing.compare import distance, fit_multiple, named_arrays
from jtrain.testing.failed_step import MATCH, FailedSplit
from jtrain.testing.result import Cause, compare_results, state_tree_of
from jtrain.testing.row_sums import CompiledRowSums, add_sums

# (name of a state tree, the leaves of a state) -> the numbers of the tree as one vector
Part: TypeAlias = Callable[[str, dict[str, np.ndarray]], np.ndarray]


def explain_state(failed: FailedSplit) -> Cause | None:
    """Return why the state differs; None if it does not, or if loss or gradient differ already."""
    result_distances = compare_results(failed.actual, failed.expected)
    if max(result_distances.loss, result_distances.gradient.by) > failed.tolerance:
        return None
    actual, expected = named_arrays(failed.actual.state), named_arrays(failed.expected.state)
    off = [
        n
        for n in expected
        if n not in actual or distance(actual[n], expected[n]).by > failed.tolerance
    ]
    if not off:
        return None
    parameters = tuple(failed.expected.leaves())

    def part(where: str, tree: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([tree[f"{where}/{p}" if p else where].ravel() for p in parameters])

    wrong = {state_tree_of(name, parameters) for name in off}
    if "params" in wrong:
        return _explain_params(failed, part)
    complete = {w for w in wrong if all((f"{w}/{p}" if p else w) in expected for p in parameters)}
    found = _explain_average(failed, part, sorted(complete)) or _explain_extra(failed, off)
    return found or Cause(
        "state", f"loss and gradient are right, and {off[0]} of the next state is not."
    )


def _explain_params(failed: FailedSplit, part: Part) -> Cause:
    """Return the cause for wrong parameters."""
    actual, expected, before = (
        named_arrays(tree) for tree in (failed.actual.state, failed.expected.state, failed.start)
    )
    factor, residual = fit_multiple(
        part("params", actual) - part("params", expected), part("params", before)
    )
    if residual < 10 * MATCH:
        return Cause(
            "decay per part",
            f"the gradient is right, and the parameters are off by {factor:.3g} times their old "
            f"values: weight decay is applied again for each {failed.noun}. Let the optimizer "
            f"apply it, once per step.",
        )
    return Cause(
        "update", "the gradient is right and the parameters after the step are not: the update."
    )


def _explain_average(failed: FailedSplit, part: Part, parts: list[str]) -> Cause | None:
    """Return a cause if a state tree lags behind the parameters."""
    actual, expected, before = (
        named_arrays(tree) for tree in (failed.actual.state, failed.expected.state, failed.start)
    )
    step = part("params", expected) - part("params", before)
    for where in parts:
        factor, residual = fit_multiple(part(where, actual) - part(where, expected), step)
        if residual < 100 * MATCH:
            return Cause(
                "stale average",
                f"{where} is behind by {-factor:.3g} of the parameters' last step: it averages the "
                f"parameters from before the update. Average the updated parameters.",
            )
    return None


def _explain_extra(failed: FailedSplit, off: list[str]) -> Cause | None:
    """Return a cause if running statistics are those of one part."""
    extra = sorted(name for name in off if name.startswith("extra"))
    if not extra or failed.count == 1:
        return None
    rows, actual = CompiledRowSums(failed.case), named_arrays(failed.actual.state)
    for index, word in ((-1, "last"), (0, "first")):
        single = named_arrays(add_sums([rows(failed.parts[index])], failed.case).state)
        if all(distance(actual[name], single[name]).by <= MATCH for name in extra):
            return Cause(
                "statistics of one part",
                f"{extra[0]} is the value of the {word} {failed.noun} alone: running statistics of "
                f"the others are lost. Sum them as Means.",
            )
    return None
