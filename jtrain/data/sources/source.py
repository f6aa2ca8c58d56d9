"""The interface of data sets: rows by index, many at once."""

from typing import Protocol, runtime_checkable

import numpy as np


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
