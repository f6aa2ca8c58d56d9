"""What is wrong in a mean that depends on how many rows there are."""

import numpy as np

from jtrain.testing.cause import Cause
from jtrain.testing.splits import alternating, hidden, ragged, taken, two_halves
from jtrain.testing.trials import Trials
from jtrain.testing.why_masks import constant_of, padded_size

FIT = 1e-6  # how far off an explanation may be, relative to what it explains
LEAST = 3  # draws of the parameters at which two halves have to differ, or be something


def cause_of_counts(name: str, trials: Trials) -> Cause:
    """Return why a mean is not that of its parts, where no row changes what another one adds."""
    if not trials.of.masks:
        if found := constant_of(name, trials):
            return found
        short = np.arange(trials.of.rows // 2)
        if trials.changes(name, hidden(trials.batch, short), taken(trials.batch, short)):
            return padded_size(name)
    return (
        _sum(name, trials)
        or mean_of_means(name, trials)
        or Cause(
            "number of rows",
            f"{name} depends on how many rows the loss sees, and not on what the rows beside a row "
            f"hold: its size (len, shape) or the count of its mask is in it. Return a sum over "
            f"rows and its weight, `jt.Mean.of(values_by_row, batch['mask'])`.",
        )
    )


def mean_of_means(name: str, trials: Trials) -> Cause | None:
    """Return a cause where a mean is that of each slice by itself; None if it is something else.

    The value for all rows then lies between those of two slices, and divides them at the same place
    whatever the parameters are: it is what each was divided by, which no parameter is in.
    """
    apart = [values for values in _halves(name, trials) if not _adds_up(values)]
    if not apart or not all(_divides_at_one_place(values) for values in apart):
        return None
    *each, whole = (f"{weight:.6g}" for weight in apart[0][1][:, 0])
    return Cause(
        "mean of means",
        f"{name} has the weights {', '.join(each)} of two halves and {whole} of both, and is "
        f"divided by other numbers: it is a mean of the halves' own means, in which rows of the "
        f"smaller one count more. Return `jt.Mean.of(values_by_row, batch['mask'])`: a sum over "
        f"rows (or tokens) and its weight.",
    )


def _sum(name: str, trials: Trials) -> Cause | None:
    """A sum that is returned as if it were a mean."""
    for values in _halves(name, trials):
        first, second, both = _means(values)
        off, size = np.abs(first + second - both), np.abs(first) + np.abs(second) + np.abs(both)
        if not np.isfinite(off).all() or np.any(off > FIT * size) or np.sum(size > 0) < LEAST:
            return None
    scalar = "a plain scalar is to be the mean over" if trials.of.masks else "a Mean is divided by"
    return Cause(
        "sum as a mean",
        f"{name} of two halves adds up as it stands, so it is a sum: {scalar} the rows it was "
        f"computed from, and its weight is the same for fewer of them, or is not counted at all. "
        f"Return the sum and the weight of its rows, `jt.Mean.of(values_by_row, batch['mask'])`.",
    )


def _halves(name: str, trials: Trials) -> list[tuple[np.ndarray, np.ndarray]]:
    """The totals and weights of two halves and of all, split in two ways.

    One half has fewer rows that count where a mask may hide some.
    """
    batch = trials.batch if trials.of.masks else ragged(trials.batch)
    ways = two_halves(batch), alternating(batch)
    return [trials.values(name, [*split.parts, split.whole]) for split in ways]


def _means(values: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return values[0] / values[1]


def _adds_up(values: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether the whole is the mean of the halves, each by its weight."""
    totals, weights = (np.stack([x[0] + x[1], x[2]]) for x in values)
    got, want = _means((totals, weights))
    return bool(np.all(np.abs(got - want) <= FIT * (np.abs(got) + np.abs(want))))


def _divides_at_one_place(values: tuple[np.ndarray, np.ndarray]) -> bool:
    first, second, both = _means(values)
    known = np.isfinite(first) & np.isfinite(second) & np.isfinite(both)
    known &= np.abs(first - second) > FIT * (np.abs(first) + np.abs(second))
    if known.sum() < LEAST:
        return False
    between, above = (first - second)[known], (both - second)[known]
    share = float(between @ above / (between @ between))
    off = np.max(np.abs(above - share * between))
    return FIT < share < 1 - FIT and bool(off <= FIT * np.max(np.abs(between)))
