"""Causes for a mean that depends on the number of rows."""

from collections.abc import Sequence

import numpy as np

from jtrain.core.types import Batch
from jtrain.testing.result import Cause
from jtrain.testing.row_flow import MeanFlow
from jtrain.testing.splits import (
    hide_other_rows,
    make_ragged,
    split_alternating,
    split_halves,
    take_rows,
)
from jtrain.testing.trials import DRAWS_OF_PARAMS, TURNS, Trials, with_contents
from jtrain.testing.why_masks import explain_constant, explain_padded_size
from jtrain.testing.why_neighbours import explain_coupling

FIT = 1e-6  # relative tolerance of an explanation
LEAST = 3  # draws of the parameters at which two halves must differ, or be nonzero


def explain_counts(name: str, trials: Trials) -> Cause:
    """Return why a mean differs from that of its parts although rows do not interact."""
    if found := _explain_row_numbers(name, trials):
        return found
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
        or _explain_from_trace(name, trials)
        or Cause(
            "number of rows",
            f"{name} depends on how many rows the loss gets, and not on their contents: the size "
            f"of the batch (len, shape) or the count of its mask enters it. Return a sum over rows "
            f"and its weight, `jt.Mean.of(values_by_row, batch['mask'])`.",
        )
    )


def _explain_row_numbers(name: str, trials: Trials) -> Cause | None:
    """Return a cause if the numbers of some rows change what other rows add; else None."""
    batch, half = trials.batch, np.arange(trials.case.rows) < trials.case.rows // 2
    changes = half & False, half, ~half, half | True
    found = [{**batch, "row": batch["row"] + 7 * change.astype(np.int32)} for change in changes]
    totals, weights = trials.values(name, found)  # n d
    for x in (totals, weights):
        if np.max(np.abs(x[0] - x[1] - x[2] + x[3])) > trials.close * np.max(np.abs(x)):
            return Cause(
                "row numbers",
                f"what a row adds to {name} depends on the numbers of other rows, by a sum or a "
                f"maximum over `batch['row']`: a part of the batch has other numbers. Compute with "
                f"the number of each row alone.",
            )
    return None


def _explain_from_trace(name: str, trials: Trials) -> Cause | None:
    """Return a cause if rows interact in the trace, though in no experiment: any row above 0."""
    flow = trials.flows.get(name, MeanFlow())
    facts = {**flow.weight.facts, **flow.total.facts}.items()
    meet = any(x.contents for kind, x in facts if kind not in ("whole", "narrow"))
    return explain_coupling(name, trials) if meet else None


def explain_dropped(name: str, parts: Sequence[Batch], trials: Trials) -> Cause | None:
    """Return a cause if a mean leaves out some rows of a part that count; else None."""
    for part in parts:
        rows = np.arange(len(part["mask"]))
        dropped = [i for i in rows if not trials.depends_on_rows(name, part, rows == i)]
        if dropped and len(dropped) < len(rows):
            return Cause(
                "rows dropped",
                f"{name} of {len(rows)} rows leaves out row {dropped[0]}, and that of all "
                f"{trials.case.rows} rows does not: rows are taken in groups of a fixed size "
                f"(`len(x) // 4 * 4`), and the others are dropped. Pad the last group and hide the "
                f"padding, or take each row by itself.",
            )
    return None


def explain_mean_of_means(name: str, trials: Trials) -> Cause | None:
    """Return a cause if a mean is the mean of each slice's own mean; None otherwise.

    The value for all rows then lies between those of two slices, and divides their interval in the
    same ratio for any parameters: the ratio of the divisors, which no parameter enters.
    """
    failing = [values for values in _halves(name, trials) if not _adds_up(values)]
    if failing and all(np.ptp(totals, 1).max() == 0 for totals, _ in failing):
        # No parameter enters: a ratio that is constant in them says nothing.
        failing = [x for x in _halves(name, trials, contents=True) if not _adds_up(x)]
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


def _halves(
    name: str, trials: Trials, *, contents: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return totals and weights of two halves and of all rows, for two ways to split them.

    If masks may hide rows, one half has fewer rows that count. `contents`: rows of other contents,
    too, one draw after the other.
    """
    batch = trials.batch if trials.case.mask_error else make_ragged(trials.batch)
    draw, rows = np.random.default_rng(0), np.arange(len(batch["mask"]))
    drawn = [with_contents(batch, draw.choice(rows, len(rows)), rows >= 0) for _ in range(TURNS)]
    found = []
    for make in (split_halves, split_alternating):
        splits = map(make, drawn if contents else [batch])
        draws = 1 if contents else DRAWS_OF_PARAMS
        values = [trials.values(name, [*split.parts, split.whole], draws) for split in splits]
        totals, weights = (np.concatenate(x, 1) for x in zip(*values, strict=True))
        found.append((totals, weights))
    return found


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
