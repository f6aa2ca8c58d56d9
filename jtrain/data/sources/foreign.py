"""Arrays and tables of other libraries, and dtypes that JAX has not."""

from collections import Counter
from typing import Any

import numpy as np

from jtrain.errors import DataError

FRAMES = {"pandas", "polars", "modin", "geopandas", "pyarrow"}
LAZY = ("to_pandas", "toPandas", "compute", "df")  # methods of other tables that give a frame


def to_array(x: Any) -> Any:
    """Return a tensor of torch or TensorFlow or a column of Arrow as a numpy array; else `x`.

    A torch tensor is detached and moved to the CPU; bfloat16, which numpy lacks, becomes float32.
    A LazyFrame of polars is collected.
    """
    if library_name(x) == "torch" and hasattr(x, "detach"):
        x = x.detach().cpu()
        return (x.float() if "bfloat16" in str(x.dtype) else x).numpy()
    if library_name(x) == "tensorflow" and hasattr(x, "numpy"):
        return x.numpy()
    if library_name(x) == "pyarrow" and not hasattr(x, "columns"):
        return x.to_numpy(zero_copy_only=False)
    return x.collect() if library_name(x) == "polars" and hasattr(x, "collect") else x


def get_columns(table: Any) -> dict[str, Any] | None:
    """Return the columns of a table or of a structured array by name; None for anything else.

    Raises:
        DataError: two columns of one name, a row without a value (of polars or Arrow), or a table
            that is not in memory.
    """
    if fields := getattr(getattr(table, "dtype", None), "names", None):
        return {name: table[name] for name in fields}
    if isinstance(table, np.ndarray) or not hasattr(table, "columns"):
        return None
    if library_name(table) not in FRAMES:
        if how := next((name for name in LAZY if hasattr(table, name)), None):
            raise DataError(
                f"A {type(table).__name__} is a table that cannot be read by rows. Give it in "
                f"memory: data.{how}()."
            )
        return None
    names = getattr(table, "column_names", table.columns)
    new = f"[f'c{{i}}' for i in range({len(names)})]"
    arrow = library_name(table) == "pyarrow"
    check_names(names, f"data.rename_columns({new})" if arrow else f"data.columns = {new}")
    columns = {str(name): table[name] for name in names}
    for name, column in columns.items():
        nulls = getattr(column, "null_count", 0)
        if nulls() if callable(nulls) else nulls:
            values = column.to_pylist() if hasattr(column, "to_pylist") else column.to_list()
            raise DataError(
                f"Column {name!r} has no value in row {values.index(None)}. Leave such rows out, "
                f"data.{'drop_null' if arrow else 'drop_nulls'}(), or fill them."
            )
    return {name: column.to_numpy() for name, column in columns.items()}


def check_names(names: Any, advice: str) -> None:
    """Raise DataError if two columns would be one array."""
    if twice := [name for name, count in Counter(map(str, names)).items() if count > 1]:
        raise DataError(
            f"Two columns are named {twice[0]!r}, and would be one array. Give each a name of its "
            f"own: {advice}"
        )


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
    missing = [v is None or type(v).__name__ in {"NAType", "NaTType"} for v in values]
    if any(missing):
        row = missing.index(True) * len(array) // len(values)
        return f"Row {row} has no value. Leave such rows out, as by frame.dropna(), or fill them."
    if all(isinstance(value, list | np.ndarray) for value in values):
        return f"Make its rows one array: np.stack({name})."
    try:
        array.astype("float32")
    except (TypeError, ValueError):
        return f"Give numbers: np.unique({name}, return_inverse=True)[1] numbers classes."
    return f"Its values are numbers: give {name}.astype('float32')."


def library_name(x: Any) -> str:
    """Return the name of the library that the class of `x` comes from."""
    return type(x).__module__.partition(".")[0]


def is_array(x: Any) -> bool:
    """Return whether `x` is an array of any library."""
    return hasattr(x, "shape") and hasattr(x, "dtype")
