"""Causes for a mean that changes with hidden rows."""

import numpy as np

from jtrain.core.types import Batch
from jtrain.testing.result import Cause
from jtrain.testing.splits import SumSplit, hide_other_rows, take_rows
from jtrain.testing.trials import Trials


def explain_hidden(name: str, split: SumSplit, trials: Trials) -> Cause:
    """Return why a mean of a padded batch differs from that of its real rows alone."""
    padded = split.parts[0]
    return _explain_inverted(name, padded, trials) or _explain_contents(name, padded, trials)


def explain_empty(name: str, trials: Trials) -> Cause | None:
    """Return why a slice without unmasked rows changes a mean; None if no reason is found."""
    empty = hide_other_rows(trials.batch, np.arange(0))
    if found := _explain_inverted(
        name, hide_other_rows(trials.batch, np.arange(trials.case.rows // 2)), trials
    ):
        return found
    mean = trials.means_of(empty)[name]
    if not (np.isfinite(mean.total).all() and np.isfinite(mean.weight).all()):
        return explain_empty_slice(name)
    if trials.depends_on_rows(name, empty, ~empty["mask"]):
        return _explain_counted(name)
    return None


def explain_empty_slice(name: str) -> Cause:
    """Return the cause of a mean, or gradient, that is not finite for an empty slice."""
    return Cause(
        "empty slice",
        f"{name} is NaN for a slice without unmasked rows, 0/0: a small last batch leaves some "
        f"devices without one, and the step is skipped on all devices. Divide by "
        f"`jnp.maximum(count, 1)`, or return the sum and its weight undivided.",
    )


def explain_constant(name: str, trials: Trials) -> Cause | None:
    """Return a cause if a mean of no rows is not 0, for any number of hidden rows."""
    counts = [hide_other_rows(trials.batch, np.arange(n)) for n in (0, 1, trials.case.rows)]
    empty, *nonempty = (trials.means_of(rows)[name] for rows in counts)
    if trials.changes(name, counts[0], take_rows(counts[0], np.arange(trials.case.rows // 2))):
        return None
    if np.any(np.asarray(empty.weight) != 0) and np.array_equal(
        nonempty[0].weight, nonempty[1].weight
    ):
        return None  # a constant weight counts nothing
    which = "total" if np.any(np.asarray(empty.total) != 0) else "weight"
    constant = float(np.ravel(empty.total if which == "total" else empty.weight)[0])
    if not constant:
        return None
    return Cause(
        "constant in each slice",
        f"the {which} of {name} is {constant:.6g} for a slice without unmasked rows: a constant (a "
        f"penalty, an epsilon) is added once for each slice and device. Make it a term of its "
        f"own, `loss + 0.1 * jt.Mean(penalty, jnp.float32(1))`, or multiply it by the count.",
    )


def explain_padded_size(name: str) -> Cause:
    """Return the cause of a mean that changes only with the number of hidden rows."""
    return Cause(
        "padded size",
        f"{name} changes with the number of hidden rows and not with their contents: it is divided "
        f"by the size of an array, or depends on whether all rows are real. Count by the mask: "
        f"`jt.Mean.of(values_by_row, batch['mask'])`.",
    )


def _explain_inverted(name: str, padded: Batch, trials: Trials) -> Cause | None:
    """Return a cause if hidden rows are counted and the others are not."""
    real = padded["mask"]
    if trials.depends_on_rows(name, padded, real) or not trials.depends_on_rows(
        name, padded, ~real
    ):
        return None
    return Cause(
        "inverted mask",
        f"{name} changes with the contents of hidden rows and not with the rows that count: the "
        f"mask is inverted. A mask is true for rows that count; use it without `~`, and the values "
        f"in `jnp.where(mask, values, 0)`.",
    )


def _explain_contents(name: str, padded: Batch, trials: Trials) -> Cause:
    """Return how the contents of hidden rows, or their number, change a mean."""
    if not trials.depends_on_rows(name, padded, ~padded["mask"]):
        return explain_padded_size(name)
    if trials.rows_interact(name, padded, ~padded["mask"]):
        return Cause(
            "hidden rows in a statistic",
            f"the contents of hidden rows change {name}, through a statistic over rows that "
            f"includes them. Pass the mask to the layer that computes the statistic.",
        )
    return _explain_counted(name)


def _explain_counted(name: str) -> Cause:
    return Cause(
        "hidden rows",
        f"the contents of hidden rows are counted in {name}: the mask is not applied to all of "
        f"its values. `jt.Mean.of(values_by_row, batch['mask'])` masks values and weight.",
    )
