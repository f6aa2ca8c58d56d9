"""The ways to split the rows of a batch that a loss must not notice."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from jtrain.core.types import Batch

Kind = Literal["order", "split", "mask", "empty"]


class SumSplit(NamedTuple):
    """Parts that must add up to a whole."""

    name: str
    kind: Kind
    parts: tuple[Batch, ...]
    whole: Batch


def splits(batch: Batch, *, hides: bool, meets: bool) -> Iterator[SumSplit]:
    """Another order, two halves twice, hidden rows and padding, in few shapes: all rows, and half.

    Args:
        batch: an even number of rows.
        hides: whether its loss takes masks that hide rows.
        meets: whether its rows meet by declaration: then only the whole of them is right, in the
            order that it has.
    """
    rows = len(batch["mask"])
    half, draw = rows // 2, np.random.default_rng(0)
    order = draw.permutation(rows)
    uneven = ragged(batch) if hides else batch
    if not meets:
        yield SumSplit("rows in another order", "order", (taken(batch, order),), batch)
        yield two_halves(uneven)
        yield alternating(uneven)
    if hides and not meets:
        yield SumSplit("an empty slice", "empty", (hidden(batch, np.arange(0)), batch), batch)
    if hides:
        short = np.arange(half)
        yield SumSplit("padded", "mask", (hidden(batch, short),), taken(batch, short))
        some = np.sort(draw.permutation(rows)[:half])
        yield SumSplit("rows hidden", "mask", (hidden(batch, some),), taken(batch, some))


def two_halves(batch: Batch) -> SumSplit:
    """The first half of the rows, and the second."""
    parts = np.split(np.arange(len(batch["mask"])), 2)
    halves = tuple(taken(batch, rows) for rows in parts)
    return SumSplit("first and second half", "split", halves, batch)


def alternating(batch: Batch) -> SumSplit:
    """Rows 0, 2, 4, ..., and rows 1, 3, 5, ..."""
    parts = (np.arange(i, len(batch["mask"]), 2) for i in (0, 1))
    return SumSplit("every other row", "split", tuple(taken(batch, rows) for rows in parts), batch)


def repeated(batch: Batch, rows: int) -> dict[str, np.ndarray]:
    """The rows of a batch over and over, each with a number of its own."""
    again = taken(batch, np.arange(rows) % len(batch["mask"]))
    return {**again, "row": np.arange(rows, dtype=np.int32)}


def taken(batch: Batch, rows: np.ndarray) -> dict[str, np.ndarray]:
    """These rows alone."""
    return {name: array[rows] for name, array in batch.items()}


def hidden(batch: Batch, kept: np.ndarray) -> dict[str, np.ndarray]:
    """The batch, its mask true for these rows alone and where it was."""
    among = np.isin(np.arange(len(batch["mask"])), kept)
    return {**batch, "mask": batch["mask"] & among}


def ragged(batch: Batch) -> dict[str, np.ndarray]:
    """The batch with its last rows hidden, so that no two parts of it weigh the same.

    Half of them less one: of 16 rows on 8 devices the last three have none.
    """
    rows = len(batch["mask"])
    kept = rows - max(rows // 2 - 1, 0)
    short = hidden(batch, np.arange(kept))
    return short if short["mask"].any() else dict(batch)


def scrambled(batch: Batch) -> dict[str, np.ndarray]:
    """The batch with other things in the rows that its mask hides; `row` and `mask` as they are."""
    rows, mask = np.arange(len(batch["mask"])), batch["mask"]
    from_real = np.where(mask, rows, np.roll(rows[mask], 1)[rows % max(mask.sum(), 1)])
    other = taken(batch, from_real)
    return {**other, "row": batch["row"], "mask": mask}
