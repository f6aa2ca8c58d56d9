"""What is wrong in a loss that does not add up over rows: one experiment after the other."""

from collections.abc import Sequence

import numpy as np

from jtrain.core.mean import Mean
from jtrain.testing.cause import Cause
from jtrain.testing.compare import distance, flatten
from jtrain.testing.row_flow import means
from jtrain.testing.row_sums import RowSums, together
from jtrain.testing.splits import SumSplit, taken
from jtrain.testing.trials import GRADIENT, Trials
from jtrain.testing.why_counts import cause_of_counts, mean_of_means
from jtrain.testing.why_draws import cause_of_draws
from jtrain.testing.why_masks import cause_of_empty, cause_of_hidden, empty_slice
from jtrain.testing.why_neighbours import cause_of_neighbours
from jtrain.testing.why_numbers import cause_of_overflow

FIT = 1e-6  # of a coefficient: far above rounding


def cause_of_split(split: SumSplit, trials: Trials) -> Cause:
    """Return why the parts of a split do not add up to its whole.

    Each experiment takes away one thing that the result may depend on: random draws, the ends of
    whole numbers, what other rows hold, their order, what a mask hides, how many rows there are.
    """
    if trials.draws_by_key and trials.undrawn:
        failing = [frozen for frozen in trials.undrawn if not frozen.holds(split)]
        if not failing:
            return cause_of_draws(trials)
        trials = failing[0]
    if trials.double and trials.facts("whole") and trials.counted.holds(split):
        return cause_of_overflow(split, trials)
    (_, parts), (_, whole) = (together(trials.rows, x) for x in (split.parts, [split.whole]))
    if found := _of_coefficients(parts, whole[0]):
        return found
    if split.kind in {"mask", "empty"} and (found := _of_meeting_terms(trials)):
        return found
    for name, mean in means(whole[0].returned).items():
        of_parts = [means(part.returned)[name] for part in parts]
        if not _adds_up(of_parts, mean, trials.close):
            return _of_mean(name, split, trials)
    if split.kind == "empty" and not np.isfinite(flatten(parts[0].gradient)).all():
        return empty_slice(GRADIENT)
    return Cause(
        "gradient",
        "totals and weights add up and the gradient does not: a derivative of its own "
        "(custom_vjp, custom_jvp) or a stop_gradient that sees more than its row.",
    )


def _adds_up(parts: Sequence[Mean], whole: Mean, tolerance: float) -> bool:
    """Whether a mean of parts is that of all: both sums are, or the two in their ratio."""
    total = sum(np.asarray(part.total, np.float64) for part in parts)
    weight = sum(np.asarray(part.weight, np.float64) for part in parts)
    near = lambda got, want: distance(np.asarray(got), np.asarray(want, np.float64)).by
    if near(weight, whole.weight) <= tolerance:
        return near(total, whole.total) <= tolerance
    if np.any(weight == 0) or np.any(np.asarray(whole.weight) == 0):
        return False
    return near(total * whole.weight, np.asarray(whole.total, np.float64) * weight) <= tolerance


def _of_coefficients(parts: Sequence[RowSums], whole: RowSums) -> Cause | None:
    """A coefficient that is computed from the rows."""
    for index, coefficient in enumerate(whole.returned.terms.coefficients):
        of_parts = [part.returned.terms.coefficients[index] for part in parts]
        if any(abs(float(c) - float(coefficient)) > FIT * abs(coefficient) for c in of_parts):
            told = ", ".join(f"{float(c):.6g}" for c in of_parts)
            return Cause(
                "coefficient of rows",
                f"the coefficient of term {index} of the loss is {float(coefficient):.6g} for all "
                f"rows and {told} for parts of them: it is computed from the rows. Take it out of "
                f"the batch, or make it a Mean of its own.",
            )
    return None


def _of_meeting_terms(trials: Trials) -> Cause | None:
    """The first term in which rows meet without saying so: masks would fail for this alone."""
    if trials.of.couples != "nothing":
        return None
    names = [name for name in trials.of_rows(trials.batch) if name.startswith("term")]
    meeting = next((name for name in names if trials.meets(name)), None)
    if meeting is None:
        return None
    return mean_of_means(meeting, trials) or cause_of_neighbours(meeting, trials)


def _of_mean(name: str, split: SumSplit, trials: Trials) -> Cause:
    """Why a mean does not add up."""
    if trials.of.couples == "nothing" and trials.meets(name):
        return mean_of_means(name, trials) or cause_of_neighbours(name, trials)
    if split.kind == "mask":
        return cause_of_hidden(name, split, trials)
    if split.kind == "empty" and (found := cause_of_empty(name, trials)):
        return found
    order = np.random.default_rng(0).permutation(trials.of.rows)
    if trials.changes(name, trials.batch, taken(trials.batch, order)):
        return Cause(
            "position",
            f"{name} is another where the same rows stand in another order: it depends on the "
            f"place of a row in what the loss sees. Use what the row holds, `batch['row']` say.",
        )
    return cause_of_counts(name, trials)
