"""The interface of data sets, rows by index; and imports of their optional packages."""

import importlib
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.errors import DataError


@runtime_checkable
class Source(Protocol):
    """Rows that can be read in any order."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        """Return the rows at `indices` (int64, b), in that order: arrays by name, each b ...

        A complete batch is read at once, as a single row costs microseconds of Python.
        """
        ...


def import_optional(module: str, extra: str, what: str) -> ModuleType:
    """Import and return a module.

    Raises:
        DataError: if it is not installed; the message has the command that installs it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise DataError(
            f"{what} was requested, which needs {package}, and {package} is not installed. "
            f"Install it: pip install 'jtrain[{extra}]'"
        ) from error


def to_native(name: str, array: Any) -> Any:
    """Return an array in the byte order of this machine.

    Raises:
        DataError: if JAX has not its dtype; the message has the array's name.
    """
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return array
    if dtype.kind in "biufc" and dtype.char not in "gG":  # g: long double
        return array if dtype.isnative else np.asarray(array, dtype.newbyteorder("="))
    if dtype.kind == "V" and dtype.type is not np.void:  # bfloat16 and float8 of ml_dtypes
        return array
    raise DataError(
        f"`{name}` holds {dtype} values, which no device can hold. {_advice(name, array)}"
    )


def _advice(name: str, array: np.ndarray) -> str:
    """Return what to write for an array without numbers."""
    if array.dtype.names:
        return f"Give one of its fields: {name}[{array.dtype.names[0]!r}]."
    if array.dtype.char in "gG":
        return f"Give {name}.astype({'float64' if array.dtype.char == 'g' else 'complex128'!r})."
    if array.dtype.kind in "Mm":
        start = f"({name} - {name}.min())" if array.dtype.kind == "M" else name
        return f"Give numbers, such as days: {start} / np.timedelta64(1, 'D')."
    values = array.ravel().tolist()
    if any(v is None or type(v).__name__ in {"NAType", "NaTType"} for v in values):
        return "A row has no value. Leave such rows out, as by frame.dropna(), or fill them."
    if all(isinstance(value, list | np.ndarray) for value in values):
        return f"Make its rows one array: np.stack({name})."
    if any(isinstance(value, str) for value in values):
        return f"Give numbers: np.unique({name}, return_inverse=True)[1] numbers classes."
    return f"If its values are numbers: give {name}.astype('float32')."
