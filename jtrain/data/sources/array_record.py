"""Records of ArrayRecord files by index, through Grain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.data.sources.files import found
from jtrain.data.sources.records import Damaged, Records
from jtrain.errors import DataError


class ArrayRecords(Records):
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

    Args:
        paths: files, a pattern, or a list of them.
        damaged: what becomes of a record that cannot be read; see `Records`.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], *, damaged: Damaged = "stop"):
        self.paths = found(paths)
        self._files = [_opened(path) for path in self.paths]
        super().__init__(paths, map(len, self._files), damaged)

    def _read(self, file: int, within: int) -> bytes:
        try:
            return self._files[file][within]
        except RuntimeError as error:
            raise DataError(
                f"{self.paths[file]}: record {within} was asked for and cannot be read ({error}). "
                f"The file is damaged: get it again, or leave such records out: "
                f"ArrayRecords(..., damaged='skip')."
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
