"""Rows of arrays in memory."""

from typing import Any

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint_arrays
from jtrain.data.sources.foreign import to_native
from jtrain.errors import DataError

RESERVED = {"row", "mask"}  # every batch has these; see jtrain/data/batches/by_step.py


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
        for name, array in self.arrays.items():
            _check_array(name, array)
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
    """Return values as an array; raise DataError if some have no value, or rows no common shape."""
    if np.ma.is_masked(values):
        raise DataError(
            f"`{name}` is a masked array, and the numbers below its mask would count. Fill them, "
            f"{name}.filled(0), and give the mask as an array of its own: real=~{name}.mask."
        )
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(
            f"The rows of `{name}` have no common shape ({error}). Pad them to the longest row, "
            f"and give each row's length as an array of its own."
        ) from error


def _check_array(name: str, array: np.ndarray) -> None:
    """Raise DataError if `array` cannot be rows of a data set."""
    if name in RESERVED:
        raise DataError(
            f"An array is called {name!r}, a name that jtrain adds to every batch. "
            f"Give it another name: Arrays({name}s=...)."
        )
    if array.ndim == 0:
        raise DataError(
            f"`{name}` is the single value {array}, and a data set needs rows. "
            f"Give an array whose first dim counts them: {name}=np.full(rows, {array})."
        )
    to_native(name, array[:0] if array.dtype.kind in "biufc" else array)
    if len(array) == 0:
        raise DataError(f"`{name}` has no rows. Give at least one; its shape is {array.shape}.")
