"""Records of several files as one sequence."""

import abc
import logging
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np

from jtrain.errors import DataError

Damaged: TypeAlias = Literal["stop", "skip"]
_log = logging.getLogger(__name__)


class Records(abc.ABC):
    """The records (bytes) of files by index, one file after the other.

    Args:
        paths: the files, as the user named them.
        counts: the number of records in each file.
        damaged: for a record that was changed `stop` raises; `skip` writes a line to the log
            `jtrain.data.sources.records` and returns the next valid record, so that every index
            still has a record, and always the same record.

    Raises:
        DataError: if there is no record.
    """

    def __init__(self, paths: Any, counts: Iterable[int], damaged: Damaged = "stop"):
        self._first = np.cumsum([0, *counts])
        if not len(self):
            raise DataError(f"{paths} holds no record. Give at least one file with records in it.")
        self.damaged: Damaged = damaged
        self.skipped: dict[int, str] = {}
        """The damaged records that were read, and the error of each."""

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: SupportsIndex, /) -> bytes:
        index = index.__index__()
        if not 0 <= index < len(self):
            raise IndexError(f"Record {index} was requested of {len(self)}, counted from 0.")
        for place in (*range(index, len(self)), *range(index)):
            try:
                return self._read_index(place)
            except DataError as error:
                if self.damaged == "stop":
                    raise
                if place not in self.skipped:
                    self.skipped[place] = str(error)
                    _log.warning("skipped: %s", error)
        raise DataError(f"None of the {len(self)} records is valid. Get the files again.")

    def _read_index(self, index: int) -> bytes:
        file = int(np.searchsorted(self._first, index, "right")) - 1
        return self._read(file, index - int(self._first[file]))

    @abc.abstractmethod
    def _read(self, file: int, within: int) -> bytes:
        """Return record `within` of a file, both counted from 0.

        Raises:
            DataError: if the record was changed; the message has the file and the record.
        """
