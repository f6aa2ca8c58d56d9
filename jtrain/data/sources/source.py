"""What a data set is: rows by index, many at once."""

from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Source(Protocol):
    """Rows that can be read in any order; a member of this shelf is a class with these methods."""

    def __len__(self) -> int:
        """How many rows there are."""
        ...

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        """The rows at `indices` (int64, b), in that order: arrays by name, each b ...

        Whole batches at once, for a row costs microseconds of Python when it is asked for alone.
        """
        ...
