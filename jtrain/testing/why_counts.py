"""Causes for a mean that depends on the number of rows."""

import numpy as np

from jtrain.testing.result import Cause
from jtrain.testing.splits import (
    hide_other_rows,
    make_ragged,
    split_alternating,
    split_halves,
    take_rows,
)
from jtrain.testing.trials import Trials
from jtrain.testing.why_masks import explain_constant, explain_padded_size

FIT = 1e-6  # relative tolerance of an explanation
LEAST = 3  # draws of the parameters at which two halves must differ, or be nonzero


def explain_counts(name: str, trials: Trials) -> Cause:
    """Return why a mean differs from that of its parts although rows do not interact."""
    if not trials.case.mask_error:
        if found := explain_constant(name, trials):
            return found
        short = np.arange(trials.case.rows // 2)
        if trials.changes(
            name, hide_other_rows(trials.batch, short), take_rows(trials.batch, short)
        ):
            return explain_padded_size(name)
    return (
        _sum(name, trials)
        or explain_mean_of_means(name, trials)
        or Cause(
            "number of rows",
            f"{name} depends on how many rows the loss gets, and not on their contents: the size "
            f"of the batch (len, shape) or the count of its mask enters it. Return a sum over rows "
            f"and its weight, `jt.Mean.of(values_by_row, batch['mask'])`.",
        )
    )


def explain_mean_of_means(name: str, trials: Trials) -> Cause | None:
    """Return a cause if a mean is the mean of each slice's own mean; None otherwise.

    The value for all rows then lies between those of two slices, and divides their interval in the
    same ratio for any parameters: the ratio of the divisors, which no parameter enters.
    """
    failing = [values for values in _halves(name, trials) if not _adds_up(values)]
    if not failing or not all(_has_constant_ratio(values) for values in failing):
        return None
    *each, whole = (f"{weight:.6g}" for weight in failing[0][1][:, 0])
    return Cause(
        "mean of means",
        f"{name} has the weights {', '.join(each)} for two halves and {whole} for both, and is "
        f"divided by other numbers: it is a mean of the halves' own means, in which rows of the "
        f"smaller half count more. Return `jt.Mean.of(values_by_row, batch['mask'])`: a sum over "
        f"rows (or tokens) and its weight.",
    )


def _sum(name: str, trials: Trials) -> Cause | None:
    """Return a cause if a sum is returned as if it were a mean."""
    for values in _halves(name, trials):
        first, second, both = _means(values)
        off, size = np.abs(first + second - both), np.abs(first) + np.abs(second) + np.abs(both)
        if not np.isfinite(off).all() or np.any(off > FIT * size) or np.sum(size > 0) < LEAST:
            return None
    contract = (
        "a plain scalar must be the mean over" if trials.case.mask_error else "a Mean is divided by"
    )
    return Cause(
        "sum as a mean",
        f"the values of {name} for two halves add up to that of the whole, so it is a sum: "
        f"{contract} the rows it was computed from, and its weight is the same for fewer rows, or "
        f"is not counted at all. Return the sum and the weight of its rows, "
        f"`jt.Mean.of(values_by_row, batch['mask'])`.",
    )


def _halves(name: str, trials: Trials) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return totals and weights of two halves and of all rows, for two ways to split them.

    If masks may hide rows, one half has fewer rows that count.
    """
    batch = trials.batch if trials.case.mask_error else make_ragged(trials.batch)
    pairs = split_halves(batch), split_alternating(batch)
    return [trials.values(name, [*split.parts, split.whole]) for split in pairs]


def _means(values: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return values[0] / values[1]


def _adds_up(values: tuple[np.ndarray, np.ndarray]) -> bool:
    """Return whether the whole is the weighted mean of the halves."""
    totals, weights = (np.stack([x[0] + x[1], x[2]]) for x in values)
    actual, expected = _means((totals, weights))
    return bool(np.all(np.abs(actual - expected) <= FIT * (np.abs(actual) + np.abs(expected))))


def _has_constant_ratio(values: tuple[np.ndarray, np.ndarray]) -> bool:
    first, second, both = _means(values)
    known = np.isfinite(first) & np.isfinite(second) & np.isfinite(both)
    known &= np.abs(first - second) > FIT * (np.abs(first) + np.abs(second))
    if known.sum() < LEAST:
        return False
    between, above = (first - second)[known], (both - second)[known]
    ratio = float(between @ above / (between @ between))
    off = np.max(np.abs(above - ratio * between))
    return FIT < ratio < 1 - FIT and bool(off <= FIT * np.max(np.abs(between)))
