"""What is wrong in a mean that changes with rows which a mask hides."""

import numpy as np

from jtrain.core.types import Batch
from jtrain.testing.cause import Cause
from jtrain.testing.splits import SumSplit, hidden, taken
from jtrain.testing.trials import Trials


def cause_of_hidden(name: str, split: SumSplit, trials: Trials) -> Cause:
    """Return why a mean of a padded batch is not that of its real rows alone."""
    padded = split.parts[0]
    return _inverted(name, padded, trials) or _of_contents(name, padded, trials)


def cause_of_empty(name: str, trials: Trials) -> Cause | None:
    """Return why a slice without a row that counts changes a mean; None if all do, one by one."""
    empty = hidden(trials.batch, np.arange(0))
    if found := _inverted(name, hidden(trials.batch, np.arange(trials.of.rows // 2)), trials):
        return found
    mean = trials.of_rows(empty)[name]
    if not (np.isfinite(mean.total).all() and np.isfinite(mean.weight).all()):
        return empty_slice(name)
    if trials.holds_of(name, empty, ~empty["mask"]):
        return _counted(name)
    return None


def empty_slice(name: str) -> Cause:
    """A mean, or its gradient, that is no number where a slice has no row that counts."""
    return Cause(
        "empty slice",
        f"{name} is no number where a slice has no row that counts, 0/0: a small last batch leaves "
        f"some devices without one, and the step is skipped on all of them. Divide by "
        f"`jnp.maximum(count, 1)`, or return the sum and its weight undivided.",
    )


def constant_of(name: str, trials: Trials) -> Cause | None:
    """Return a cause where a mean of no rows is not 0, however many are hidden."""
    counts = [hidden(trials.batch, np.arange(n)) for n in (0, 1, trials.of.rows)]
    none, *some = (trials.of_rows(rows)[name] for rows in counts)
    if trials.changes(name, counts[0], taken(counts[0], np.arange(trials.of.rows // 2))):
        return None
    if np.any(np.asarray(none.weight) != 0) and np.array_equal(some[0].weight, some[1].weight):
        return None  # a weight that is the same for any rows, and counts nothing
    which = "total" if np.any(np.asarray(none.total) != 0) else "weight"
    found = float(np.ravel(none.total if which == "total" else none.weight)[0])
    if not found:
        return None
    return Cause(
        "constant in each slice",
        f"the {which} of {name} is {found:.6g} where no row counts: what does not belong to rows "
        f"(a penalty, a guard that adds) is added once for each slice and device. Make it a term "
        f"of its own, `loss + 0.1 * jt.Mean(penalty, jnp.float32(1))`, or multiply it by the "
        f"count.",
    )


def padded_size(name: str) -> Cause:
    """A mean that changes with the number of hidden rows alone."""
    return Cause(
        "padded size",
        f"{name} changes with the number of hidden rows and not with what they hold: it is divided "
        f"by the size of an array, or asks whether all rows are there. Count by the mask: "
        f"`jt.Mean.of(values_by_row, batch['mask'])`.",
    )


def _inverted(name: str, padded: Batch, trials: Trials) -> Cause | None:
    """Rows that the mask hides are counted, and no others."""
    real = padded["mask"]
    if trials.holds_of(name, padded, real) or not trials.holds_of(name, padded, ~real):
        return None
    return Cause(
        "inverted mask",
        f"{name} changes with what hidden rows hold and not with the rows that count: the mask is "
        f"used the other way round. It is true for rows that count; use it without `~`, and the "
        f"values in `jnp.where(mask, values, 0)`.",
    )


def _of_contents(name: str, padded: Batch, trials: Trials) -> Cause:
    """Whether it is what hidden rows hold, and how it gets in; or how many they are."""
    if not trials.holds_of(name, padded, ~padded["mask"]):
        return padded_size(name)
    if trials.meets(name, padded, ~padded["mask"]):
        return Cause(
            "hidden rows in a statistic",
            f"what the hidden rows hold changes {name}, through a statistic over rows that counts "
            f"them, too. Give the mask to the layer that takes it.",
        )
    return _counted(name)


def _counted(name: str) -> Cause:
    return Cause(
        "hidden rows",
        f"what the hidden rows hold is counted in {name}: the mask does not reach all of its "
        f"values. `jt.Mean.of(values_by_row, batch['mask'])` takes care of values and weight.",
    )
