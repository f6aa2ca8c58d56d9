"""Checks of the names, shapes and types of rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jtrain.errors import DataError


def check_rows(
    arrays: Mapping[str, np.ndarray], wanted: Mapping[str, Any], who: str
) -> dict[str, np.ndarray]:
    """Return the wanted arrays, each of the wanted type; drop the others.

    Args:
        arrays: n ... by name.
        wanted: the shape and the dtype of a row of each array.
        who: the consumer of the rows, for messages.

    Raises:
        DataError: if one is missing, of another shape, or its numbers do not fit the type.
    """
    checked = {}
    for name, row in wanted.items():
        if name not in arrays:
            found = ", ".join(arrays) or "nothing"
            raise DataError(
                f"{who} takes {describe(wanted)}, and {name} is missing: found {found}. Rename the "
                f"intended array to {name}."
            )
        checked[name] = _cast(
            name, _check_shape(name, arrays[name], row.shape, who), row.dtype, who
        )
    return checked


def describe(wanted: Mapping[str, Any]) -> str:
    """Return the arrays of rows as text: `image float32[n, 8, 8], label int32[n]`."""
    types = {
        name: f"{np.dtype(row.dtype)}[{', '.join(map(str, ('n', *row.shape)))}]"
        for name, row in wanted.items()
    }
    return ", ".join(f"{name} {type_}" for name, type_ in types.items()) or "nothing"


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...], who: str) -> np.ndarray:
    if array.ndim and array.shape[1:] == shape:
        return array
    n = len(array) if array.ndim > len(shape) else 1
    expected = ", ".join(map(str, ("n", *shape)))
    advice = f"{name}.reshape({', '.join(map(str, (-1, *shape)))})"
    if array.shape == shape:
        advice = f"{name}[None] for a single row"
    elif array.size != n * int(np.prod(shape)):
        advice = f"an array of n rows, each {list(shape)}"
    raise DataError(
        f"{who} takes {name} of shape [{expected}], and it is {list(array.shape)}: give {advice}"
    )


def _cast(name: str, array: np.ndarray, dtype: Any, who: str) -> np.ndarray:
    dtype = np.dtype(dtype)
    problem = f"{who} takes {name} as {dtype}, and it is {array.dtype}"
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf":
        raise DataError(f"{problem}: give numbers")
    if dtype.kind == "f" and array.dtype.kind in "iu" and array.dtype.itemsize == 1:
        raise DataError(
            f"{problem}, bytes: training scaled them. Scale them in the same way, and give "
            f"{name}.astype({dtype.name!r})"
        )
    if dtype.kind == "f" or (dtype.kind == "b") == (array.dtype.kind == "b"):
        cast = array.astype(dtype)
        if dtype.kind == "f" or np.array_equal(cast, array):
            return cast
    raise DataError(
        f"{problem}: give whole numbers that fit {dtype}, {name}.astype({dtype.name!r})"
    )
