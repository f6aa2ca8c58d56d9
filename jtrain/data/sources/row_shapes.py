"""Whether arrays are rows such as something takes: by their names, their shapes and their types."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jtrain.errors import DataError


def check_rows(
    arrays: Mapping[str, np.ndarray], wanted: Mapping[str, Any], who: str
) -> dict[str, np.ndarray]:
    """Return the arrays that are wanted, each of the wanted type; others are left out.

    Args:
        arrays: n ... by name.
        wanted: the shape and the dtype of a row of each.
        who: takes them, for messages.

    Raises:
        DataError: if one is missing, of another shape, or its numbers do not fit the type.
    """
    taken = {}
    for name, row in wanted.items():
        if name not in arrays:
            there = ", ".join(arrays) or "nothing"
            raise DataError(
                f"{who} takes {describe(wanted)}, and {name} is not there: there is {there}. Call "
                f"the array that it is {name}."
            )
        taken[name] = _typed(name, _shaped(name, arrays[name], row.shape, who), row.dtype, who)
    return taken


def describe(wanted: Mapping[str, Any]) -> str:
    """Return what rows are made of: `image float32[n, 8, 8], label int32[n]`."""
    of = lambda row: f"{np.dtype(row.dtype)}[{', '.join(map(str, ('n', *row.shape)))}]"
    return ", ".join(f"{name} {of(row)}" for name, row in wanted.items()) or "nothing"


def _shaped(name: str, array: np.ndarray, shape: tuple[int, ...], who: str) -> np.ndarray:
    if array.ndim and array.shape[1:] == shape:
        return array
    n = len(array) if array.ndim > len(shape) else 1
    told = ", ".join(map(str, ("n", *shape)))
    advice = f"{name}.reshape({', '.join(map(str, (-1, *shape)))})"
    if array.shape == shape:
        advice = f"{name}[None] for a single row"
    elif array.size != n * int(np.prod(shape)):
        advice = f"an array of n rows, each {list(shape)}"
    raise DataError(
        f"{who} takes {name} of shape [{told}], and it is {list(array.shape)}: give {advice}"
    )


def _typed(name: str, array: np.ndarray, dtype: Any, who: str) -> np.ndarray:
    dtype = np.dtype(dtype)
    told = f"{who} takes {name} as {dtype}, and it is {array.dtype}"
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf":
        raise DataError(f"{told}: give numbers")
    if dtype.kind == "f" and array.dtype.kind in "iu" and array.dtype.itemsize == 1:
        raise DataError(
            f"{told}, bytes: they were scaled for training. Scale them in the same way, and give "
            f"{name}.astype({dtype.name!r})"
        )
    if dtype.kind == "f" or (dtype.kind == "b") == (array.dtype.kind == "b"):
        cast = array.astype(dtype)
        if dtype.kind == "f" or np.array_equal(cast, array):
            return cast
    raise DataError(f"{told}: give whole numbers that fit {dtype}, {name}.astype({dtype.name!r})")
