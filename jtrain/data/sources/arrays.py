"""Rows of arrays in memory, subsets of a source, and batches from several sources."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint, fingerprint_arrays
from jtrain.data.batches.shuffle import permute
from jtrain.data.sources.source import Source, to_native
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers


class Arrays:
    """Arrays that share their leading dim: `Arrays(image=images, label=labels)`.

    Raises:
        DataError: no arrays, no rows, lengths that differ, or values that no device can hold.
    """

    def __init__(self, **arrays: Any):  # each: n ...
        self.arrays = {name: _as_array(name, array) for name, array in arrays.items()}
        if not arrays:
            raise DataError(
                "Arrays() was given no arrays. Name them: Arrays(image=..., label=...)."
            )
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(
                f"Arrays of a data set need one length, and these differ: {found}. "
                f"Cut them to {min(lengths.values())} rows, or find the missing rows."
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return {name: array.take(indices, 0) for name, array in self.arrays.items()}

    def fingerprint(self) -> str:
        """Return the fingerprint of the arrays."""
        return fingerprint_arrays(len(self), self.arrays)


def _as_array(name: str, values: Any) -> np.ndarray:
    """Return values as an array; raise DataError if they cannot be rows of a data set."""
    if np.ma.is_masked(values):
        raise DataError(
            f"`{name}` is a masked array, and the numbers below its mask would count. Fill them, "
            f"{name}.filled(0), and give the mask as an array of its own: real=~{name}.mask."
        )
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(
            f"The rows of `{name}` have no common shape ({error}). Pad them to the longest row, "
            f"and give each row's length as an array of its own."
        ) from error
    if array.ndim == 0:
        raise DataError(
            f"`{name}` is the single value {array}, and a data set needs rows. "
            f"Give an array whose first dim counts them: {name}=np.full(rows, {array})."
        )
    to_native(name, array[:0] if array.dtype.kind in "biufc" else array)
    if len(array) == 0:
        raise DataError(f"`{name}` has no rows. Give at least one; its shape is {array.shape}.")
    return array


Row = TypeVar("Row")
SPLIT = 0x5EED  # seed of the split: the same on every machine, in every run


class Subset:
    """The rows of `source` at `indices` (int64, n), in that order; nothing is copied.

    Raises:
        DataError: an index out of range, or indices that are not a row of whole numbers.
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
        advice = f"Set validation={0.1 if rows >= 10 else 0.5}." if rows > 1 else "Give 2 or more."
        raise DataError(
            f"validation={share} of {rows} rows would hold out "
            f"{'none' if held_out < 1 else 'all'} of them. {advice}"
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


def read_interleaved(
    sources: Mapping[Any, Source], source_of: np.ndarray, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Return a batch of rows of several sources: `rows` (int64, b) of sources `source_of` (b).

    Raises:
        DataError: if their rows have other arrays.
    """
    batch, names = dict[str, np.ndarray](), list(sources)
    for number, count in enumerate(np.bincount(source_of).tolist()):
        if not count:
            continue
        (chosen,) = (source_of == number).nonzero()
        found = sources[names[number]][rows[chosen]]
        batch = batch or {n: np.empty((len(rows), *x.shape[1:]), x.dtype) for n, x in found.items()}
        odd = found.keys() != batch.keys()
        for name, array in () if odd else found.items():
            target = batch[name]
            odd |= array.dtype != target.dtype or array.shape[1:] != target.shape[1:]
            if not odd:
                target[chosen] = array
        if odd:
            one, other = (
                ", ".join(f"{n} {x.dtype}{list(x.shape[1:])}" for n, x in each.items())
                for each in (batch, found)
            )
            raise DataError(
                f"Rows of a batch need one type and shape, and those of source {names[number]!r} "
                f"have {other} where it was {one} before. Make them alike: one context for all "
                f"texts, one size for all images."
            )
    return batch
