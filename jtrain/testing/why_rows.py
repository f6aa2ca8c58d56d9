"""Causes for a loss that does not add up over rows, found by one experiment after the other."""

from collections.abc import Sequence

import numpy as np

from jtrain.core.loss import named_means
from jtrain.core.mean import Mean
from jtrain.testing.compare import distance, flatten
from jtrain.testing.result import Cause
from jtrain.testing.row_sums import RowSums, add_parts
from jtrain.testing.splits import SumSplit, take_rows
from jtrain.testing.trials import GRADIENT, Trials
from jtrain.testing.why_counts import explain_counts, explain_mean_of_means
from jtrain.testing.why_draws import explain_draws
from jtrain.testing.why_masks import explain_empty, explain_empty_slice, explain_hidden
from jtrain.testing.why_neighbours import explain_coupling
from jtrain.testing.why_numbers import explain_overflow

FIT = 1e-6  # relative tolerance of a coefficient: far above rounding


def explain_split(split: SumSplit, trials: Trials) -> Cause:
    """Return why the parts of a split do not add up to its whole.

    Each experiment removes one dependence: random draws, integer overflow, the contents of other
    rows, their order, hidden rows, the number of rows.
    """
    if trials.draws_by_key and trials.frozen_trials:
        failing = [frozen for frozen in trials.frozen_trials if not frozen.holds(split)]
        if not failing:
            return explain_draws(trials)
        trials = failing[0]
    if trials.double and trials.facts("whole") and trials.without_overflow.holds(split):
        return explain_overflow(split, trials)
    (_, parts), (_, whole) = (add_parts(trials.rows, x) for x in (split.parts, [split.whole]))
    if found := _explain_coefficients(parts, whole[0]):
        return found
    if split.kind in {"mask", "empty"} and (found := _explain_coupled_terms(trials)):
        return found
    for name, mean in named_means(whole[0].returned).items():
        of_parts = [named_means(part.returned)[name] for part in parts]
        if not adds_up(of_parts, mean, trials.close):
            return _explain_mean(name, split, trials)
    if split.kind == "empty" and not np.isfinite(flatten(parts[0].gradient)).all():
        return explain_empty_slice(GRADIENT)
    return Cause(
        "gradient",
        "totals and weights add up and the gradient does not: a custom derivative (custom_vjp, "
        "custom_jvp) or a stop_gradient that depends on more than one row.",
    )


def adds_up(parts: Sequence[Mean], whole: Mean, tolerance: float) -> bool:
    """Return whether the sums of parts give the mean of all: both sums equal, or their ratio."""
    total = sum(np.asarray(part.total, np.float64) for part in parts)
    weight = sum(np.asarray(part.weight, np.float64) for part in parts)
    off = lambda actual, expected: distance(np.asarray(actual), np.asarray(expected, np.float64)).by
    if off(weight, whole.weight) <= tolerance:
        return off(total, whole.total) <= tolerance
    if np.any(weight == 0) or np.any(np.asarray(whole.weight) == 0):
        return False
    return off(total * whole.weight, np.asarray(whole.total, np.float64) * weight) <= tolerance


def _explain_coefficients(parts: Sequence[RowSums], whole: RowSums) -> Cause | None:
    """Return a cause if a coefficient is computed from the rows."""
    for index, coefficient in enumerate(whole.returned.terms.coefficients):
        of_parts = [part.returned.terms.coefficients[index] for part in parts]
        if any(abs(float(c) - float(coefficient)) > FIT * abs(coefficient) for c in of_parts):
            values = ", ".join(f"{float(c):.6g}" for c in of_parts)
            return Cause(
                "coefficient of rows",
                f"the coefficient of term {index} of the loss is {float(coefficient):.6g} for all "
                f"rows and {values} for parts of them: it is computed from the rows. Make it "
                f"independent of the batch, or a Mean of its own.",
            )
    return None


def _explain_coupled_terms(trials: Trials) -> Cause | None:
    """Return the cause for the first term with undeclared coupling, which fails mask checks too."""
    if trials.case.couples != "nothing":
        return None
    names = [name for name in trials.means_of(trials.batch) if name.startswith("term")]
    meeting = next((name for name in names if trials.rows_interact(name)), None)
    if meeting is None:
        return None
    return explain_mean_of_means(meeting, trials) or explain_coupling(meeting, trials)


def _explain_mean(name: str, split: SumSplit, trials: Trials) -> Cause:
    """Return why a mean does not add up."""
    if trials.case.couples == "nothing" and trials.rows_interact(name):
        return explain_mean_of_means(name, trials) or explain_coupling(name, trials)
    if split.kind == "mask":
        return explain_hidden(name, split, trials)
    if split.kind == "empty" and (found := explain_empty(name, trials)):
        return found
    order = np.random.default_rng(0).permutation(trials.case.rows)
    if trials.changes(name, trials.batch, take_rows(trials.batch, order)):
        return Cause(
            "position",
            f"{name} changes with the order of the rows: it depends on the position of a row in "
            f"the batch. Use the contents of the row, such as `batch['row']`.",
        )
    return explain_counts(name, trials)
