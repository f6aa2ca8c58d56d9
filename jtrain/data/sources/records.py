"""The records of several files as one sequence."""

import abc
import logging
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np

from jtrain.errors import DataError

Damaged: TypeAlias = Literal["stop", "skip"]
_log = logging.getLogger(__name__)


class Records(abc.ABC):
    """`len`, and by index the records (bytes) of files, one file after the other.

    Args:
        asked: the files, as they were named.
        counts: of records in each.
        damaged: what becomes of a record that is not as it was written: `stop` raises; `skip` says
            so in a line of the log `jtrain.data.sources.records`, and gives the next whole one
            instead, so that every index still has a record, and always the same.

    Raises:
        DataError: if there is no record.
    """

    def __init__(self, asked: Any, counts: Iterable[int], damaged: Damaged = "stop"):
        self._first = np.cumsum([0, *counts])
        if not len(self):
            raise DataError(f"{asked} holds no record. Give at least one file with records in it.")
        self.damaged: Damaged = damaged
        self.skipped: dict[int, str] = {}
        """The damaged records that were asked for, and what is wrong with each."""

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: SupportsIndex, /) -> bytes:
        index = index.__index__()
        if not 0 <= index < len(self):
            raise IndexError(f"Record {index} was asked for of {len(self)}, counted from 0.")
        for place in (*range(index, len(self)), *range(index)):
            try:
                return self._at(place)
            except DataError as error:
                if self.damaged == "stop":
                    raise
                if place not in self.skipped:
                    self.skipped[place] = str(error)
                    _log.warning("left out: %s", error)
        raise DataError(f"None of the {len(self)} records is whole. Get the files again.")

    def _at(self, index: int) -> bytes:
        file = int(np.searchsorted(self._first, index, "right")) - 1
        return self._read(file, index - int(self._first[file]))

    @abc.abstractmethod
    def _read(self, file: int, within: int) -> bytes:
        """Record `within` of a file, both counted from 0.

        Raises:
            DataError: if it is not what was written, by file and record.
        """
