"""The records of several files as one sequence."""

import abc
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np

from jtrain.errors import DataError


class Records(abc.ABC):
    """`len`, and by index the records (bytes) of files, one file after the other.

    Args:
        asked: the files, as they were named.
        counts: of records in each.

    Raises:
        DataError: if there is no record.
    """

    def __init__(self, asked: Any, counts: Iterable[int]):
        self._first = np.cumsum([0, *counts])
        if not len(self):
            raise DataError(f"{asked} holds no record. Give at least one file with records in it.")

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: SupportsIndex, /) -> bytes:
        index = index.__index__()
        if not 0 <= index < len(self):
            raise IndexError(f"Record {index} was asked for of {len(self)}, counted from 0.")
        file = int(np.searchsorted(self._first, index, "right")) - 1
        return self._read(file, index - int(self._first[file]))

    @abc.abstractmethod
    def _read(self, file: int, within: int) -> bytes:
        """Record `within` of a file, both counted from 0."""
