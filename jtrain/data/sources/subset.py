"""Subsets of a source, and the split into training and validation rows."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint, fingerprint_arrays
from jtrain.data.batches.shuffle import permute
from jtrain.data.sources.source import Source
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers

Row = TypeVar("Row")
SPLIT = 0x5EED  # seed of the split: the same on every machine, in every run


class Subset:
    """The rows of `source` at `indices` (int64, n), in that order; nothing is copied.

    Raises:
        DataError: an index out of range, or indices that are no row of whole numbers.
    """

    def __init__(self, source: Source, indices: np.ndarray):
        found = np.asarray(indices)
        if found.size and (found.dtype.kind not in "iu" or found.ndim != 1):
            raise DataError(
                f"A subset needs one row of whole numbers, and its indices are {found.dtype} of "
                f"shape {found.shape}. A mask chooses rows by Subset(source, np.flatnonzero(mask))."
            )
        self.source, self.indices = source, found.astype(np.int64)
        wrong = (self.indices < 0) | (self.indices >= len(source))
        if wrong.any():
            raise DataError(
                f"A subset was requested with row {self.indices[wrong][0]} of {len(source)}, "
                f"counted from 0. Drop the row: indices[indices < {len(source)}]."
            )

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return self.source[self.indices[indices]]

    def fingerprint(self) -> str:
        """Return the fingerprint of the indices and of the source."""
        return f"{fingerprint_arrays(len(self), {'': self.indices})} of {fingerprint(self.source)}"


@plain_numbers
def hold_out(source: Source, share: float) -> tuple[Subset, Subset]:
    """Split the rows at random, by a fixed seed: all but a `share` of them, and that share.

    Each row is in one of the two subsets, which keep the order of the source.

    Raises:
        DataError: if one of the two would be empty.
    """
    rows = len(source)
    held_out = round(rows * share)
    if not 0 < held_out < rows:
        raise DataError(
            f"validation={share} of {rows} rows would hold out "
            f"{'none' if held_out < 1 else 'all'} of them. "
            + (f"Set validation={_valid_share(rows)}." if rows > 1 else "Give at least 2 rows.")
        )
    places = permute(np.arange(rows, dtype=np.int64), rows, seed=SPLIT, epoch=0)
    return Subset(source, np.sort(places[:-held_out])), Subset(source, np.sort(places[-held_out:]))


def hold_out_last(
    rows: Sequence[Row], share: float, *, where: object, noun: str
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Split rows in their order: all but the last ones, and a `share` of them at the end.

    Each part has a row at least.

    Args:
        where: the files of the rows, as the config names them.
        noun: of a row.

    Raises:
        DataError: if there are fewer than two.
    """
    if len(rows) < 2:
        raise DataError(
            f"{where} has {len(rows)} {noun}{'s' * (not rows)}, and training and validation need "
            f"one each. Give more."
        )
    first = len(rows) - min(len(rows) - 1, max(1, round(len(rows) * share)))
    return rows[:first], rows[first:]


def some_rows(source: Source, rows: int) -> Subset:
    """Return `rows` of the rows, drawn by a fixed seed, in the order of the source.

    Raises:
        DataError: if the source has fewer.
    """
    if rows > len(source):
        raise DataError(
            f"data.rows={rows} rows were requested of {len(source)}. Set data.rows={len(source)}, "
            f"or 0 for all."
        )
    places = permute(np.arange(len(source), dtype=np.int64), len(source), seed=SPLIT, epoch=0)
    return Subset(source, np.sort(places[:rows]))


def _valid_share(rows: int) -> str:
    """Return a share that leaves rows on both sides."""
    return "0.1" if rows >= 10 else "0.5"
