"""The interface of data sets, rows by index; and imports of their optional packages."""

import importlib
from types import ModuleType
from typing import Protocol, runtime_checkable

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
