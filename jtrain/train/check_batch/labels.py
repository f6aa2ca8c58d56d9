"""Labels of a batch: those out of range, no probabilities, and whether the loss counts them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrain.errors import DataError
from jtrain.train.check_batch.uses import Use, Uses

MAX_VALUES = 64  # values of an array that are tried
MAX_FOUND = 8  # values that are returned
NEAR = 1e-2  # how far the sum of a distribution may be off: 256 chances in bfloat16
OFF = "checks.first_batch=false (check_batch=False in a call) turns this check off."


class OutOfRangeValue(NamedTuple):
    """Value of a batch that is used as an index, and selects no entry."""

    leaf: str
    value: int
    entries: int
    """Size of the indexed dim: valid values are 0 .. entries - 1."""
    shape: tuple[int, ...]
    instead: Sequence[int]
    """Two valid values, since a loss may itself map the value to one of them."""
    row: int
    """First row with the value, in the full batch."""


def find_out_of_range(
    uses: Uses, batch: Mapping[str, np.ndarray], rows: int | None = None
) -> list[OutOfRangeValue]:
    """Return the values in unmasked rows that select no entry, at most 8.

    An array of the batch is filled with one value after another, so that indices computed from the
    array (`label - 1`) are attributed to its values.

    Args:
        batch: arrays with `row` and `mask`; the rows of this process.
        rows: rows of the traced batch, if it has more.
    """
    real = np.flatnonzero(batch["mask"])
    if not real.size or all(_in_range(use, batch, real) for use in uses.found):
        return []
    filler = {name: batch[name][np.resize(real, rows or len(real))] for name in uses.leaves}

    def outside(filled: Mapping[str, np.ndarray]) -> list[bool]:
        values = [(use.entries, np.asarray(use.values)) for use in uses.evaluate(filled)]
        return [bool(n and ((x < 0) | (x >= n)).any()) for n, x in values]

    found: dict[tuple[str, int], OutOfRangeValue] = {}
    for i, wrong in enumerate(outside(filler)):
        use = uses.found[i]
        for leaf in sorted(use.leaves - {"row"}) if wrong else ():
            if batch[leaf].dtype.kind not in "iu":
                continue

            def fits(value: int, leaf: str = leaf, i: int = i) -> bool:
                return not outside(filler | {leaf: np.full_like(filler[leaf], value)})[i]

            values = _candidates(batch[leaf][real], use.entries)
            invalid = [value for value in values if not fits(value)]
            candidates = dict.fromkeys([0, use.entries - 1, 1, use.entries, *values])
            valid = list(itertools.islice(filter(fits, candidates), 2))
            for value in invalid if valid else ():
                row = int(batch["row"][real][_rows_with(batch[leaf][real], value)][0])
                each = OutOfRangeValue(leaf, value, use.entries, use.shape, valid, row)
                found.setdefault((leaf, value), each)
    return list(found.values())[:MAX_FOUND]


def swap_value(
    batch: Mapping[str, np.ndarray], found: OutOfRangeValue
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Return a batch of the rows with a value, repeated, and the batches with valid values instead.

    If no unmasked row has the value, all unmasked rows are used.
    """
    real, array = np.flatnonzero(batch["mask"]), batch[found.leaf]
    matching = real[_rows_with(array[real], found.value)]
    rows = np.resize(matching if matching.size else real, len(array))
    original = {name: each[rows] for name, each in batch.items()}
    replace = lambda x: np.where(original[found.leaf] == found.value, x, original[found.leaf])
    return original, [
        original | {found.leaf: replace(x).astype(array.dtype)} for x in found.instead
    ]


def is_counted(original: Any, replaced: Any) -> bool:
    """Return whether a value changes the loss without changing its weight.

    A loss that ignores some labels (-1, -100, 255) either does not change with them, or has another
    weight for other labels.

    Args:
        original, replaced: totals and weights of the loss for two batches of `swap_value`:
            with the value, and with a valid one.
    """
    same = lambda x, y: np.array_equal(x, y, equal_nan=True)
    (totals, weights), (new_totals, new_weights) = original, replaced
    same_totals = all(same(x, y) for x, y in zip(totals, new_totals, strict=True))
    return not same_totals and all(same(x, y) for x, y in zip(weights, new_weights, strict=True))


def out_of_range_error(found: OutOfRangeValue, what: str, origin: Sequence[int] = ()) -> DataError:
    """Return the error for an out-of-range value that the loss counts.

    Args:
        origin: for each row of the full batch its index in the data, if known.
    """
    leaf, entries, shape = found.leaf, found.entries, tuple(found.shape)
    shift = f", `{leaf} - 1` where they count from 1" if found.value == entries else ""
    end = (
        f" To count from the end on purpose, write `{leaf} % {entries}`." if found.value < 0 else ""
    )
    return DataError(
        f"`{leaf}` chooses one of {entries} entries, 0 .. {entries - 1}, of an array of shape "
        f"{shape}, and {_row_name(found.row, what, origin)} holds {found.value}. For it JAX "
        f"silently takes another entry, NaN or none. Give integers in 0 .. {entries - 1}{shift}. "
        f"Give a row that is to be ignored no weight: `jt.Mean.of(values, "
        f'batch["mask"] & (batch["{leaf}"] != {found.value}))`.{end} {OFF}'
    )


def _in_range(use: Use, batch: Mapping[str, np.ndarray], real: np.ndarray) -> bool:
    """Return True if all integers of a use are known to be in range without a computation."""
    if use.domain or not use.moved:
        return bool(use.domain)
    (leaf,) = use.leaves
    values = batch[leaf][real]
    return values.dtype.kind in "iu" and bool(values.min() >= 0 and values.max() < use.entries)


def _candidates(array: np.ndarray, entries: int) -> list[int]:
    values = np.unique(array)
    likely = (values < 0) | (values >= entries)
    return [int(x) for x in (*values[likely], *values[~likely])][:MAX_VALUES]


def _rows_with(array: np.ndarray, value: int) -> np.ndarray:
    return (array == value).any(tuple(range(1, array.ndim)))


def describe_outside(
    uses: Uses, batch: Mapping[str, np.ndarray], rows: int, what: str, origin: Sequence[int] = ()
) -> str:
    """Describe the first value in an unmasked row that a loss is not defined for; "" if none is.

    Args:
        batch: arrays with `row` and `mask`; the rows of this process.
        rows: rows of the traced batch.
        origin: for each row of the full batch its index in the data, if known.
    """
    real = np.flatnonzero(batch["mask"])
    if not real.size or not any(use.domain for use in uses.found):
        return ""
    rows_of = np.resize(real, rows)
    for use in uses.evaluate({name: batch[name][rows_of] for name in uses.leaves}):
        wide = np.asarray(use.values, np.float64)
        most = 1 + NEAR if use.domain in {"probabilities", "distributions"} else np.inf
        wrong, shown = ~((wide >= 0) & (wide <= most)), wide
        if use.domain == "distributions" and not wrong.any():
            shown = wide.sum(-1)
            wrong = abs(shown - 1) > NEAR
        if use.domain and wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            row = int(batch["row"][rows_of[at[0]]]) if len(wide) == rows else 0
            leaf = min(use.leaves - {"mask", "row", "weight"}, default=min(use.leaves))
            holds = f"{shown[at]:g}" + (" in sum" if shown is not wide else "")
            must = "in 0 .. 1" if use.domain == "probabilities" else "0 or more"
            must += ", 1 in sum" if use.domain == "distributions" else ""
            return (
                f"the loss takes {use.domain} from `{leaf}`, {must}, and "
                f"{_row_name(row, what, origin)} holds {holds}: the loss of it is that of no "
                f"distribution. Give `{_advise(leaf, use.domain, wide, float(shown[at]))}`, or "
                f"hide the row by its mask. {OFF}"
            )
    return ""


def _advise(leaf: str, domain: str, values: np.ndarray, wrong: float) -> str:
    low, high, single = values.min(), values.max(), domain == "probabilities"
    if np.isnan(wrong) or wrong == 0:  # no factor makes a distribution of it
        real = f"({leaf} >= 0)"
        return f"weight={real}" if single else f"weight={real}.any(-1) & ({leaf}.sum(-1) > 0)"
    if single and low < 0:
        return f"{leaf} > 0"
    if single:
        return f"{leaf} - 1" if (low, high) == (1, 2) else f"{leaf} / {high:g}"
    if low < 0:
        return f"jax.nn.softmax({leaf}) of logits"
    return f"{leaf} / {leaf}.sum(-1, keepdims=True)"


def _row_name(row: int, what: str, origin: Sequence[int]) -> str:
    of_data = f" (row {origin[row]} of the data)" if len(origin) else ""
    return f"row {row} of {what}{of_data}"
