"""Where batches first hold a NaN or an infinity."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrain.data.batches.stacked import StepBatches


def not_finite(
    batches: StepBatches, steps: range, rows_of: Callable[[int], Sequence[int]] | None = None
) -> str:
    """The first value in the batches of these steps that is not finite; or that all are.

    Steps count from 1 here, as a run says them: step 1 takes batch 0.

    Args:
        rows_of: gives which rows of the data set a step takes, none if that is not known.
    """
    for step in steps:
        batch = batches[step - 1]
        if found := first_not_finite(batch):
            rows = rows_of(step) if rows_of else ()
            of = f" (row {rows[found.row]} of the data set)" if rows else ""
            return (
                f"In the batch of step {step}, row {found.row} of `{found.array}` has {found}{of}."
            )
    return f"In the batches of steps {steps[0]} to {steps[-1]} every value is finite."


class NonfiniteValue(NamedTuple):
    """A value that is not finite, and its place."""

    array: str
    row: int
    """In the whole batch."""
    place: tuple[int, ...]
    """Within the row."""
    value: float

    def __str__(self) -> str:
        where = f" at {list(self.place)}" if self.place else ""
        return f"{self.value}{where}"


def first_not_finite(batch: Mapping[str, np.ndarray]) -> NonfiniteValue | None:
    """Return the first value of a batch that is not finite; None if there is none."""
    for name, array in batch.items():
        if not np.issubdtype(array.dtype, np.floating) or np.isfinite(array).all():
            continue
        row, *place = np.argwhere(~np.isfinite(array))[0].tolist()
        value = float(array[(row, *place)])
        return NonfiniteValue(name, int(batch["row"][row]), tuple(place), value)
    return None
