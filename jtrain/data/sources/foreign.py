"""Arrays and tables of other libraries."""

from typing import Any


def to_array(x: Any) -> Any:
    """Return a tensor of torch or TensorFlow as a numpy array, anything else as it is.

    A torch tensor is detached and moved to the CPU; bfloat16, which numpy lacks, becomes float32.
    """
    if library_name(x) == "torch" and hasattr(x, "detach"):
        x = x.detach().cpu()
        return (x.float() if "bfloat16" in str(x.dtype) else x).numpy()
    if library_name(x) == "tensorflow" and hasattr(x, "numpy"):
        return x.numpy()
    return x


def get_columns(table: Any) -> dict[str, Any] | None:
    """Return the columns of a pandas or polars DataFrame by name; None for anything else."""
    if library_name(table) not in {"pandas", "polars"} or not hasattr(table, "columns"):
        return None
    return {str(name): table[name].to_numpy() for name in table.columns}


def library_name(x: Any) -> str:
    """Return the name of the library that the class of `x` comes from."""
    return type(x).__module__.partition(".")[0]


def is_array(x: Any) -> bool:
    """Return whether `x` is an array of any library."""
    return hasattr(x, "shape") and hasattr(x, "dtype")
