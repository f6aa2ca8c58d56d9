"""Labels of a batch that choose no class, and whether the loss counts them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrain.errors import DataError
from jtrain.train.first_batch.index_uses import IndexUse, IndexUses

VALUES = 64  # of an array that are tried, at most; and those that are judged
JUDGED = 8


class OutOfRangeValue(NamedTuple):
    """A value of a batch that is used to choose an entry, and chooses none."""

    leaf: str
    """The array of the batch."""
    value: int
    entries: int
    """0 .. entries - 1 may be chosen."""
    shape: tuple[int, ...]
    """Of what is looked up in."""
    instead: Sequence[int]
    """Values that choose one: two, for a loss may take one of them for this value by itself."""
    row: int
    """The first that holds the value, by its place in the whole batch."""


def outside_values(
    uses: IndexUses, batch: Mapping[str, np.ndarray], rows: int | None = None
) -> list[OutOfRangeValue]:
    """Return the values in rows that no mask hides which choose no entry, 8 at most.

    An array of the batch is filled with one value after the other, so that what is computed from
    it (`label - 1`) is judged by what it holds.

    Args:
        batch: arrays with `row` and `mask`; of one process its own rows.
        rows: in the batch that was traced, if it has more.
    """
    real = np.flatnonzero(batch["mask"])
    if not real.size or all(_in_range(use, batch, real) for use in uses.found):
        return []
    whole = {name: batch[name][np.resize(real, rows or len(real))] for name in uses.leaves}
    found: list[OutOfRangeValue] = []
    for place, count in enumerate(uses.outside(whole)):
        use = uses.found[place]
        for leaf in sorted(use.leaves) if count else ():
            if batch[leaf].dtype.kind not in "iu" or leaf == "row":
                continue

            def fits(value: int, leaf: str = leaf, place: int = place) -> bool:
                filled = whole | {leaf: np.full_like(whole[leaf], value)}
                return not uses.outside(filled)[place]

            values = _suspects(batch[leaf][real], use.entries)
            wrong = [value for value in values if not fits(value)]
            known = dict.fromkeys([0, use.entries - 1, 1, use.entries, *values])
            right = list(itertools.islice((value for value in known if fits(value)), 2))
            for value in wrong if right else ():
                row = int(batch["row"][real][_holds(batch[leaf][real], value)][0])
                found.append(OutOfRangeValue(leaf, value, use.entries, use.shape, right, row))
    return list({(one.leaf, one.value): one for one in found[::-1]}.values())[::-1][:JUDGED]


def with_and_without(
    batch: Mapping[str, np.ndarray], found: OutOfRangeValue
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Return the rows that hold a value, as often as fill the batch, and the same with others.

    All rows that no mask hides where none of them holds the value.
    """
    real, array = np.flatnonzero(batch["mask"]), batch[found.leaf]
    holding = real[_holds(array[real], found.value)]
    some = np.resize(holding if holding.size else real, len(array))
    held = {name: each[some] for name, each in batch.items()}
    other = lambda x: np.where(held[found.leaf] == found.value, x, held[found.leaf])
    return held, [held | {found.leaf: other(x).astype(array.dtype)} for x in found.instead]


def counted(held: Any, mended: Any) -> bool:
    """Return whether a value takes part in the loss, and the loss has no weight for it.

    A loss that leaves some labels out (-1, -100, 255) either does not change with them, or has
    another weight where they are others.

    Args:
        held, mended: the totals and weights of the loss, of what `with_and_without` gives: of the
            rows with the value, and with another.
    """
    same = lambda x, y: np.array_equal(x, y, equal_nan=True)
    (totals, weights), (others, known) = held, mended
    pairs = zip(totals, others, strict=True), zip(weights, known, strict=True)
    return not all(same(x, y) for x, y in pairs[0]) and all(same(x, y) for x, y in pairs[1])


def refusal(found: OutOfRangeValue, what: str, origin: Sequence[int] = ()) -> DataError:
    """Return the error for a value that the loss counts.

    Args:
        what: which batch holds it, in words.
        origin: of each row of the whole batch its index in the data, if it is known.
    """
    row = f"{found.row} of {what}"
    if len(origin):
        row += f" (row {origin[found.row]} of the data)"
    leaf, entries, shape = found.leaf, found.entries, tuple(found.shape)
    shift = f", `{leaf} - 1` where they count from 1" if found.value == entries else ""
    end = (
        f" To count from the end on purpose, write `{leaf} % {entries}`." if found.value < 0 else ""
    )
    return DataError(
        f"`{leaf}` chooses one of {entries} entries, 0 .. {entries - 1}, of an array of shape "
        f"{shape}, and row {row} holds {found.value}. For it JAX takes another entry, NaN or none, "
        f"without a word. Give integers in 0 .. {entries - 1}{shift}. A row that is to be left out "
        f'has no weight: `jt.Mean.of(values, batch["mask"] & (batch["{leaf}"] != {found.value}))`.'
        f"{end} checks.first_batch=false (check_batch=False in a call) looks at no batch."
    )


def _in_range(use: IndexUse, batch: Mapping[str, np.ndarray], real: np.ndarray) -> bool:
    """Whether all integers of a use choose an entry, where that is seen without computing them."""
    if not use.moved:
        return False
    (leaf,) = use.leaves
    found = batch[leaf][real]
    return found.dtype.kind in "iu" and bool(found.min() >= 0 and found.max() < use.entries)


def _suspects(array: np.ndarray, entries: int) -> list[int]:
    """The values of an array, those that are probably wrong first, some of them."""
    values = np.unique(array)
    likely = (values < 0) | (values >= entries)
    return [int(x) for x in (*values[likely], *values[~likely])][:VALUES]


def _holds(array: np.ndarray, value: int) -> np.ndarray:
    """The rows of an array in which a value is."""
    return (array == value).any(tuple(range(1, array.ndim)))
