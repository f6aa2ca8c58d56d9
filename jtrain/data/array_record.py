"""Records of ArrayRecord files by index, through Grain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from jtrain.data.files import found
from jtrain.errors import DataError


class ArrayRecords:
    """The records (bytes) of ArrayRecord files, one file after the other: `len`, and by index.

    ```python
    rows = grain.MapDataset.source(ArrayRecords("train-*.arrayrecord")).map(read_example)
    source = GrainRows(rows)
    ```

    They are to be written with one record a group (`ArrayRecordWriter(path, "group_size:1")`): a
    whole group is unpacked for each record that is read.

    Raises:
        DataError: a file that is cut off, damaged or foreign, when it is opened or read; or no
            record.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path]):
        self.paths = found(paths)
        self._files = [_opened(path) for path in self.paths]
        self._first = np.cumsum([0, *map(len, self._files)])
        if not len(self):
            raise DataError(f"{paths} holds no record. Give at least one file with records in it.")

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: SupportsIndex, /) -> bytes:
        index = index.__index__()
        if not 0 <= index < len(self):
            raise IndexError(f"Record {index} was asked for of {len(self)}, counted from 0.")
        file = int(np.searchsorted(self._first, index, "right")) - 1
        within = index - int(self._first[file])
        try:
            return self._files[file][within]
        except RuntimeError as error:
            raise DataError(
                f"{self.paths[file]}: record {within} was asked for and cannot be read ({error}). "
                f"The file is damaged: get it again."
            ) from error


def _opened(path: Path) -> Any:
    from grain.sources import ArrayRecordDataSource  # imports JAX

    try:
        return ArrayRecordDataSource(str(path))
    except RuntimeError as error:
        raise DataError(
            f"{path} was to be an ArrayRecord file, whose index lies at its end, and has none at "
            f"byte {path.stat().st_size}, where it ends ({str(error) or 'no footer'}). "
            f"It is cut off or another file: get it again."
        ) from error
