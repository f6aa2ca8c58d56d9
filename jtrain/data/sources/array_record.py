"""Records of ArrayRecord files by index, through Grain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.data.sources.files import find_files
from jtrain.data.sources.records import Damaged, Records
from jtrain.errors import DataError


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
