"""Splits of the rows of a batch that must not change the result of a loss."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from jtrain.core.types import Batch

NUMBERS_OF_A_ROW = {"row", "mask"}


class SumSplit(NamedTuple):
    """Parts of a batch whose sums must add up to those of the whole batch."""

    name: str
    kind: Literal["order", "split", "mask", "empty"]
    parts: tuple[Batch, ...]
    whole: Batch


def iter_splits(batch: Batch, *, allow_masks: bool, coupled: bool) -> Iterator[SumSplit]:
    """Yield another order, two pairs of halves, an empty slice, padding and hidden rows.

    All parts have all rows or half of them, so that a loss compiles for few shapes.

    Args:
        batch: an even number of rows.
        coupled: whether rows interact by declaration; the batch is then neither split nor
            reordered.
    """
    rows = len(batch["mask"])
    half, draw = rows // 2, np.random.default_rng(0)
    order = draw.permutation(rows)
    ragged_batch = make_ragged(batch) if allow_masks else batch
    if not coupled:
        yield SumSplit("rows in another order", "order", (take_rows(batch, order),), batch)
        yield split_halves(ragged_batch)
        yield split_alternating(ragged_batch)
    if allow_masks and not coupled:
        empty = hide_other_rows(batch, np.arange(0))
        yield SumSplit("an empty slice", "empty", (empty, batch), batch)
    if allow_masks:
        some = np.sort(draw.permutation(rows)[:half])
        for name, rows in {"padded": np.arange(half), "rows hidden": some}.items():
            hidden = (hide_other_rows(batch, rows),)
            yield SumSplit(name, "mask", hidden, take_rows(batch, rows))


def split_halves(batch: Batch) -> SumSplit:
    """Return the split into the first and the second half of the rows."""
    return split_rows("first and second half", batch, np.split(np.arange(len(batch["mask"])), 2))


def split_alternating(batch: Batch) -> SumSplit:
    """Return the split into rows 0, 2, 4, ... and rows 1, 3, 5, ..."""
    parts = [np.arange(i, len(batch["mask"]), 2) for i in (0, 1)]
    return split_rows("every other row", batch, parts)


def split_rows(name: str, batch: Batch, parts: list[np.ndarray]) -> SumSplit:
    """Return the split into parts of these rows."""
    return SumSplit(name, "split", tuple(take_rows(batch, rows) for rows in parts), batch)


def repeat_rows(batch: Batch, rows: int) -> dict[str, np.ndarray]:
    """Repeat the rows of a batch to so many rows, numbered from 0."""
    rows_again = take_rows(batch, np.arange(rows) % len(batch["mask"]))
    return {**rows_again, "row": np.arange(rows, dtype=np.int32)}


def take_rows(batch: Batch, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return these rows of the batch."""
    return {name: array[rows] for name, array in batch.items()}


def with_contents(batch: Batch, other: np.ndarray, which: np.ndarray) -> dict[str, np.ndarray]:
    """Return the batch with the contents of rows `other` in rows `which`; keep `row` and `mask`."""
    rows = np.where(which, other, np.arange(len(which)))
    return {**take_rows(batch, rows), "row": batch["row"], "mask": batch["mask"]}


def hide_other_rows(batch: Batch, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the batch with all but these rows hidden; hidden rows stay hidden."""
    visible = np.isin(np.arange(len(batch["mask"])), rows)
    return {**batch, "mask": batch["mask"] & visible}


def make_ragged(batch: Batch) -> dict[str, np.ndarray]:
    """Hide the last rows of the batch, so that its parts have different weights.

    Half of the rows less one are hidden: with 16 rows on 8 devices the last three devices have no
    row that counts.
    """
    rows = len(batch["mask"])
    short = hide_other_rows(batch, np.arange(rows - max(rows // 2 - 1, 0)))
    return short if short["mask"].any() else dict(batch)
