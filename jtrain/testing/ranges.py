"""Batch integers that index out of range in the loss."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jtrain.core.loss import named_means
from jtrain.testing.case import LossCase
from jtrain.testing.result import Cause, Distances, compare_results
from jtrain.testing.row_sums import RowSums, add_sums
from jtrain.testing.trials import Trials
from jtrain.train.first_batch.index_uses import find_uses
from jtrain.train.first_batch.labels import (
    OutOfRangeValue,
    find_out_of_range,
    is_counted,
    swap_value,
)


class OutOfRange(NamedTuple):
    """An out-of-range integer: its effect on the result, and the cause."""

    distances: Distances
    """Distances from the loss with an integer in range instead."""
    cause: Cause


def find_counted_index(case: LossCase, trials: Trials) -> OutOfRange | None:
    """Return the first out-of-range index that changes the loss; None if there is none.

    The search is that of a run's first batch (`train.first_batch`), over the batch of the case
    and those of `case.more_batches()`.
    """
    uses = find_uses(case.trace.program, case.batch, case.trace.leaves_of_batch())
    if not uses.found:
        return None
    for batch in _chunks(case):
        for found in find_out_of_range(uses, batch):
            original, corrected = swap_value(batch, found)
            before, others = trials.rows(original), [trials.rows(other) for other in corrected]
            if any(is_counted(_numbers(before), _numbers(other)) for other in others):
                off = compare_results(add_sums([before], case), add_sums([others[0]], case))
                return OutOfRange(off, _cause(found))
    return None


def _chunks(case: LossCase) -> Iterator[Mapping[str, Any]]:
    """Yield all rows to check, as many at a time as were traced."""
    yield case.batch
    for batch in case.more_batches():
        rows = len(batch["mask"])
        for first in range(0, rows, case.rows):
            indices = np.minimum(np.arange(first, first + case.rows), rows - 1)
            part = {name: np.asarray(array)[indices] for name, array in batch.items()}
            # A loss without masks is checked on full batches only.
            yield part | {"mask": np.ones(case.rows, bool)} if case.mask_error else part


def _numbers(sums: RowSums) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the totals and the weights of the loss and its metrics."""
    found = named_means(sums.returned).values()
    return [np.asarray(m.total) for m in found], [np.asarray(m.weight) for m in found]


def _cause(found: OutOfRangeValue) -> Cause:
    shift = f", `{found.leaf} - 1` where they count from 1" if found.value == found.entries else ""
    return Cause(
        "index out of range",
        f"batch[{found.leaf!r}] holds {found.value} in row {found.row}, and the loss uses it to "
        f"index {found.entries} entries, 0 .. {found.entries - 1}, of an array of shape "
        f"{found.shape}. JAX raises no error: it reads another entry, or NaN, and trains on. Give "
        f"integers in 0 .. {found.entries - 1}{shift}, make the array wider, or hide such rows by "
        f"a weight of 0.",
    )
