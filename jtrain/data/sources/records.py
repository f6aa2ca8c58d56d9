"""Records of several files as one sequence, and records of ArrayRecord files."""

import abc
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np

from jtrain.data.sources.files import find_files
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


class ArrayRecords(Records):
    """The records (bytes) of ArrayRecord files, one file after the other: `len`, and by index.

    ```python
    rows = grain.MapDataset.source(ArrayRecords("train-*.arrayrecord")).map(read_example)
    source = GrainRows(rows)
    ```

    Write the files with one record a group (`ArrayRecordWriter(path, "group_size:1")`): each read
    of a record unpacks its complete group.

    Raises:
        DataError: a file that is cut off, damaged or of another format, when it is opened or read;
            or no record.

    Args:
        paths: files, a pattern, or a list of them.
        damaged: handling of a record that cannot be read; see `Records`.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], *, damaged: Damaged = "stop"):
        self.paths = find_files(paths)
        self._files = [_open_file(path) for path in self.paths]
        super().__init__(paths, map(len, self._files), damaged)

    def _read(self, file: int, within: int) -> bytes:
        try:
            return self._files[file][within]
        except RuntimeError as error:
            raise DataError(
                f"{self.paths[file]}: record {within} cannot be read ({error}). The file is "
                f"damaged: get it again, or skip such records: ArrayRecords(..., damaged='skip')."
            ) from error


def _open_file(path: Path) -> Any:
    from grain.sources import ArrayRecordDataSource  # imports JAX

    try:
        return ArrayRecordDataSource(str(path))
    except RuntimeError as error:
        raise DataError(
            f"{path} should be an ArrayRecord file with an index at its end, and has none at "
            f"byte {path.stat().st_size}, where it ends ({str(error) or 'no footer'}). "
            f"It is cut off or another file: get it again."
        ) from error
