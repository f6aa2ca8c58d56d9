"""Integers of a batch that a loss looks up, though they choose nothing."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jtrain.testing.case import LossCase
from jtrain.testing.cause import Cause
from jtrain.testing.result import Distances, distances
from jtrain.testing.row_flow import means
from jtrain.testing.row_sums import RowSums, added
from jtrain.testing.trials import Trials
from jtrain.train.first_batch.index_uses import find_uses
from jtrain.train.first_batch.labels import (
    OutOfRangeValue,
    counted,
    outside_values,
    with_and_without,
)


class OutOfRange(NamedTuple):
    """What becomes of an integer that chooses nothing, and why it is a fault."""

    apart: Distances
    """The loss with an integer in range in its place, from what it is."""
    cause: Cause


def out_of_range(of: LossCase, trials: Trials) -> OutOfRange | None:
    """Return the first integer that chooses nothing and is counted; None if there is none.

    It is found and judged as in the first batch of a run (`train.first_batch`), in the batch of the
    check and in those of `of.further()`.
    """
    uses = find_uses(of.trace.program, of.batch, of.trace.leaves_of_batch())
    if not uses.found:
        return None
    for batch in _parts(of):
        for found in outside_values(uses, batch):
            held, mended = with_and_without(batch, found)
            before, others = trials.rows(held), [trials.rows(other) for other in mended]
            if any(counted(_numbers(before), _numbers(other)) for other in others):
                apart = distances(added([before], of), added([others[0]], of))
                return OutOfRange(apart, _cause(found))
    return None


def _parts(of: LossCase) -> Iterator[Mapping[str, Any]]:
    """All rows that are looked at, as many at a time as were traced."""
    yield of.batch
    for batch in of.further():
        rows = len(batch["mask"])
        for first in range(0, rows, of.rows):
            places = np.minimum(np.arange(first, first + of.rows), rows - 1)
            part = {name: np.asarray(array)[places] for name, array in batch.items()}
            # A loss that takes no mask is to judge full batches alone.
            yield part | {"mask": np.ones(of.rows, bool)} if of.masks else part


def _numbers(sums: RowSums) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The totals and the weights of the loss and its metrics."""
    found = means(sums.returned).values()
    return [np.asarray(m.total) for m in found], [np.asarray(m.weight) for m in found]


def _cause(found: OutOfRangeValue) -> Cause:
    shift = f", `{found.leaf} - 1` where they count from 1" if found.value == found.entries else ""
    return Cause(
        "index out of range",
        f"batch[{found.leaf!r}] holds {found.value} in row {found.row}, and the loss chooses one "
        f"of {found.entries} entries, 0 .. {found.entries - 1}, of an array of shape {found.shape} "
        f"by it. JAX raises no error: it takes another entry, or NaN, and trains on. Give integers "
        f"in 0 .. {found.entries - 1}{shift}, make the array wider, or hide such rows by a weight "
        f"of 0.",
    )
