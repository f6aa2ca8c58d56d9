"""The first NaN or infinity in the batches of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrain.data.batches.stacked import StepBatches


def describe_nonfinite(
    batches: StepBatches, steps: range, rows_of: Callable[[int], Sequence[int]] | None = None
) -> str:
    """Describe the first value that is not finite in the batches of these steps, if any.

    Steps count from 1 here, as in the log of a run: step 1 takes batch 0.

    Args:
        rows_of: returns the rows of the data set that a step takes; empty if unknown.
    """
    for step in steps:
        batch = batches[step - 1]
        if found := find_nonfinite(batch):
            rows = rows_of(step) if rows_of else ()
            origin = f" (row {rows[found.row]} of the data set)" if rows else ""
            place = f"row {found.row} of `{found.array}`"
            return f"In the batch of step {step}, {place} has {found}{origin}."
    return f"In the batches of steps {steps[0]} to {steps[-1]} every value is finite."


class NonfiniteValue(NamedTuple):
    """A value that is not finite, and its place."""

    array: str
    row: int
    """The row in the global batch."""
    place: tuple[int, ...]
    """The index within the row."""
    value: float

    def __str__(self) -> str:
        where = f" at {list(self.place)}" if self.place else ""
        return f"{self.value}{where}"


def find_nonfinite(batch: Mapping[str, np.ndarray]) -> NonfiniteValue | None:
    """Return the first value of a batch that is not finite; None if there is none."""
    for name, array in batch.items():
        if not np.issubdtype(array.dtype, np.floating) or np.isfinite(array).all():
            continue
        row, *place = np.argwhere(~np.isfinite(array))[0].tolist()
        value = float(array[(row, *place)])
        return NonfiniteValue(name, int(batch["row"][row]), tuple(place), value)
    return None
