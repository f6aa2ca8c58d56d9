"""Checks of data: finite values and labels in range, before training and in a run's batches."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jtrain.data.sources.source import Source
from jtrain.errors import DataError

BLOCK = 1024  # rows read at once


def check_finite(source: Source) -> None:
    """Read every row; raise at the first NaN or infinity, by array and row.

    Raises:
        DataError: a value that is not finite.
    """
    for first, rows in _blocks(source):
        if found := find_nonfinite({**rows, "row": np.arange(first, first + BLOCK)}):
            raise DataError(
                f"Every value should be finite; row {found.row} of `{found.array}` has {found}. "
                f"Drop the row, or fill it: np.nan_to_num({found.array})."
            )


def check_labels(source: Source, classes: int, *, name: str = "label") -> None:
    """Read every row; raise at the first label that is not in 0 .. classes-1.

    Raises:
        DataError: a label out of range, labels that are not integers, or no array of that name.
    """
    for first, rows in _blocks(source):
        if name not in rows:
            raise DataError(
                f"Labels should be in `{name}`, and a row has {', '.join(sorted(rows))}. "
                f"Set name={next(iter(rows))!r}, or name the array {name!r}."
            )
        check_classes(rows[name], classes, name, first)


def check_classes(labels: np.ndarray, classes: int, name: str, first: int) -> None:
    """Raise DataError unless labels of rows from `first` on are whole numbers below `classes`."""
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"`{name}` should hold whole numbers in 0 .. {classes - 1} and holds "
            f"{labels.dtype}. Convert it: {name}.astype('int32')."
        )
    wrong = (labels < 0) | (labels >= classes)
    if not wrong.any():
        return
    row, value = first + int(np.argwhere(wrong)[0][0]), int(labels[wrong][0])
    advice = f"Set classes={value + 1}" if value >= 0 else "Labels count from 0: fix the row"
    if value == classes:
        advice += f", or {name} - 1 if your labels count from 1"
    raise DataError(
        f"{classes} classes were configured, 0 .. {classes - 1}; row {row} of `{name}` is {value}. "
        f"{advice}."
    )


def _blocks(source: Source) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    for first in range(0, len(source), BLOCK):
        yield first, source[np.arange(first, min(first + BLOCK, len(source)))]


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
