"""Whether the whole numbers of a batch lie in the range of what a loss indexes by them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jtrain.testing.cause import Cause
from jtrain.testing.indices import Index, indices, outside
from jtrain.testing.result import Distances, distances
from jtrain.testing.row_flow import means
from jtrain.testing.splits import taken
from jtrain.testing.subject import Subject
from jtrain.testing.sums import added
from jtrain.testing.trials import Trials


class OutOfRange(NamedTuple):
    """What became of an index that picks no place, and why it is a fault, if it is."""

    apart: Distances
    cause: Cause | None


def out_of_range(of: Subject, trials: Trials) -> OutOfRange | None:
    """Return what a loss does with the first index that is out of range; None if all are in it.

    The number is replaced by one that is in range. Where a weight changes the loss knows of it, a
    label that is to be ignored; where nothing changes it is used nowhere. Else it is counted like
    any other, with the value of whatever stands at the next place.
    """
    found = indices(of.trace.program, of.trace.leaves_of_batch())
    for rows in (of.batch, *(of.further() if found else ())):
        for index, where in outside(found, rows):
            apart, counted = _counts(of, trials, index, rows, where)
            if counted:
                return OutOfRange(apart, _cause(index, rows, where))
    return None


def _counts(
    of: Subject, trials: Trials, index: Index, rows: Mapping[str, Any], where: np.ndarray
) -> tuple[Distances, bool]:
    """How far the loss moves where the numbers are put in range, and whether it counts them."""
    wrong = np.unique(np.nonzero(where)[0])
    places = np.concatenate([wrong[: of.rows // 2], np.arange(of.rows)])[: of.rows]
    batch, bad = taken(rows, places), where[places]
    if not of.masks:
        batch = {**batch, "mask": np.ones(of.rows, bool)}
    good = np.asarray(rows[index.leaf])[~where]
    least = -index.less
    inside = good[(good >= least) & (good < least + index.size)]
    number = inside[0] if inside.size else least
    mended = {**batch, index.leaf: np.where(bad, number, batch[index.leaf])}
    mended[index.leaf] = mended[index.leaf].astype(batch[index.leaf].dtype)
    before, after = (trials.rows(x) for x in (batch, mended))
    apart = distances(added([before], of), added([after], of))
    weights = [[m.weight for m in means(x.returned).values()] for x in (before, after)]
    known = any(not np.array_equal(a, b) for a, b in zip(*weights, strict=True))
    return apart, apart.largest > 0 and not known


def _cause(index: Index, rows: Mapping[str, Any], where: np.ndarray) -> Cause:
    row = int(np.nonzero(where)[0][0])
    number = int(np.asarray(rows[index.leaf])[where][0])
    at = f" at {index.line}" if index.line else ""
    first, last = -index.less, index.size - 1 - index.less
    return Cause(
        "index out of range",
        f"batch[{index.leaf!r}] holds {number} in row {int(rows['row'][row])} ({where.sum()} of "
        f"{where.size} numbers lie outside of {first} .. {last}), and the loss picks one of "
        f"{index.size} places by it{at}. JAX raises no error: it takes another place, or NaN, and "
        f"trains on. "
        f"Give {first} .. {last}, make the array wider, or hide such rows by a weight of 0.",
    )
