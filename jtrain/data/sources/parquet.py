"""Rows of Parquet files by index (`jtrain[parquet]`), and of JSON lines and Parquet in order."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint_files
from jtrain.data.sources.content import HEAD, format_error, iterate_lines, read_content
from jtrain.data.sources.files import find_files
from jtrain.data.sources.foreign import check_columns, check_names
from jtrain.data.sources.source import import_optional
from jtrain.errors import DataError
from jtrain.io.regular_files import check_regular, open_regular, parse_json


class ParquetRows:
    """The rows of Parquet files, one file after the other.

    An array of indices gives a batch: numbers and lists of one length, b ... . A single index gives
    a row as a dict, which may also have strings and bytes: the input of `grain.MapDataset.source`,
    for rows to decode (`GrainRows(grain.MapDataset.source(rows).map(decode))`).

    Only complete row groups can be read. The most recently used row groups are cached, up to `keep`
    bytes: rows in random order need all of them in memory, so write a larger set as ArrayRecord.

    Args:
        columns: the columns to read; empty: all.

    Raises:
        DataError: files that are cut off, of another format or of different columns; a column that
            does not exist; in a batch a value that is missing or not a number; no pyarrow.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] = (),
        keep: int = 1 << 30,
    ):
        self.paths, self._keep = find_files(paths), keep
        self._files = [_open_file(path) for path in self.paths]
        self.columns = _columns(self.paths, self._files, columns)
        groups = [
            (file, group, opened.metadata.row_group(group).num_rows)
            for file, opened in enumerate(self._files)
            for group in range(opened.num_row_groups)
        ]
        self._groups = [group[:2] for group in groups]
        self._first = np.cumsum([0, *(rows for _, _, rows in groups)])
        self._cache = OrderedDict[int, Any]()  # tables by row group, the most recently used last
        self._lock = threading.Lock()  # a file of pyarrow has one reader at a time
        if not len(self):
            raise DataError(f"{paths} holds no row. Give at least one file with rows in it.")

    def __len__(self) -> int:
        return int(self._first[-1])

    @overload
    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]: ...

    @overload
    def __getitem__(self, indices: SupportsIndex, /) -> dict[str, Any]: ...

    def __getitem__(self, indices: Any, /) -> dict[str, Any]:
        if not isinstance(indices, np.ndarray):
            index = indices.__index__()
            if not 0 <= index < len(self):
                raise IndexError(f"Row {index} was requested of {len(self)}, counted from 0.")
            group = int(np.searchsorted(self._first, index, "right")) - 1
            (row,) = self._group(group).slice(index - int(self._first[group]), 1).to_pylist()
            return row
        groups = np.searchsorted(self._first, indices, "right") - 1
        batch: dict[str, np.ndarray] = {}
        for group in np.unique(groups).tolist():
            chosen = groups == group
            table = self._group(group).take(indices[chosen] - self._first[group])
            for name in self.columns:
                part = self._numbers(name, table.column(name).combine_chunks(), group)
                shape = (len(indices), *part.shape[1:])
                array = batch.setdefault(name, np.empty(shape, part.dtype))
                if array.shape != shape:
                    raise DataError(
                        f"Rows of a batch have one shape, and column {name!r} has lists of "
                        f"{array.shape[1:]} and, in {self._place(group)}, of {part.shape[1:]}. "
                        f"{BY_ROW.format(name=name)}"
                    )
                array[chosen] = part
        return batch

    def fingerprint(self) -> str:
        """Return the fingerprint of the files and the columns."""
        return fingerprint_files(self.paths, *self.columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(ParquetRows, columns=self.columns, keep=self._keep), (self.paths,)

    def _group(self, group: int) -> Any:
        """Return a row group's table, read or cached; one thread at a time."""
        with self._lock:
            if group not in self._cache:
                self._cache[group] = self._read(*self._groups[group])
                sizes = [table.nbytes for table in self._cache.values()]
                while sum(sizes) > self._keep and len(sizes) > 1:
                    self._cache.popitem(last=False)
                    del sizes[0]
            self._cache.move_to_end(group)
            return self._cache[group]

    def _read(self, file: int, number: int) -> Any:
        try:
            return self._files[file].read_row_group(number, columns=self.columns)
        except (OSError, ValueError) as error:  # pyarrow's errors for a damaged page
            raise DataError(
                f"{self.paths[file]}: row group {number} cannot be read "
                f"({' '.join(str(error).split())}). The file is damaged: get it again."
            ) from error

    def _numbers(self, name: str, array: Any, group: int) -> np.ndarray:  # b ...
        """Return a column of numbers, or of lists of one length of numbers."""
        arrow = import_optional("pyarrow", "parquet", "A Parquet file")
        if array.null_count:
            raise DataError(
                f"Column {name!r} should have a value in every row; {self._place(group)} has a "
                f"row without one. Leave the column out (columns=...), or fill it when writing "
                f"the file: frame[{name!r}].fillna(0)."
            )
        if arrow.types.is_list(array.type) or arrow.types.is_large_list(array.type):
            lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
            if len(lengths) > 1:
                raise DataError(
                    f"Rows of a batch have one shape, and column {name!r} has lists of "
                    f"{lengths[0]} and of {lengths[-1]} in {self._place(group)}. "
                    f"{BY_ROW.format(name=name)}"
                )
            values = self._numbers(name, array.flatten(), group)
            return values.reshape(len(array), int(lengths[0]), *values.shape[1:])
        if arrow.types.is_fixed_size_list(array.type):
            values = self._numbers(name, array.flatten(), group)
            return values.reshape(len(array), array.type.list_size, *values.shape[1:])
        if not (arrow.types.is_primitive(array.type) and not arrow.types.is_temporal(array.type)):
            raise DataError(
                f"Column {name!r} should hold numbers and holds {array.type}. Leave it out "
                f"(columns=...). {BY_ROW.format(name=name)}"
            )
        return array.to_numpy(zero_copy_only=False)

    def _place(self, group: int) -> str:
        file, number = self._groups[group]
        return f"row group {number} of {self.paths[file]}"


BY_ROW = (
    "Or make arrays of each row: GrainRows(grain.MapDataset.source(rows).map(decode)), where "
    "decode takes row[{name!r}] and returns a dict of arrays of one shape."
)


def _open_file(path: Path) -> Any:
    parquet = import_optional("pyarrow.parquet", "parquet", "A Parquet file")
    check_regular(path)
    try:
        return parquet.ParquetFile(path, page_checksum_verification=True)  # where a page has one
    except ValueError as error:
        raise DataError(
            f"{path} should be a Parquet file, which ends with PAR1, and ends at byte "
            f"{path.stat().st_size} without ({error}). It is cut off or another file: get it again."
        ) from error


def _columns(paths: list[Path], files: list[Any], requested: Sequence[str]) -> list[str]:
    """Return the columns to read, which all files have."""
    for path, file in zip(paths, files, strict=True):
        schema = file.schema_arrow
        if not schema.equals(files[0].schema_arrow):
            raise DataError(
                f"Files of a set need the same columns; {paths[0]} has "
                f"{_describe_schema(files[0].schema_arrow)} and {path} {_describe_schema(schema)}. "
                f"Give the files of one set."
            )
    names = files[0].schema_arrow.names
    chosen = list(requested) or names
    advice = f"table.rename_columns([...]), in {paths[0]}; or leave them out: columns=[...]"
    check_names([name for name in names if name in chosen], advice)
    check_columns(requested, names, paths[0])
    return chosen


def _describe_schema(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def iterate_rows(
    paths: str | list[str], columns: Sequence[str] = (), *, noun: str
) -> Iterator[tuple[str, Any]]:
    """Yield where each row stands, `FILE:LINE`, and its values.

    Args:
        columns: of Parquet files; none: all. Null fields are left out: each row of such a file has
            the fields of every other.
        noun: name of a row, for errors: `conversation`.

    Raises:
        DataError: if a file is missing, or a line is not UTF-8 or not JSON.
    """
    for file in find_files(paths):
        with open_regular(file) as stream:
            head = stream.read(HEAD)
        if file.suffix == ".parquet" or head.startswith(b"PAR1"):
            rows = ParquetRows([file], columns=list(columns))
            yield from ((f"{file}:{i + 1}", _without_nulls(rows[i])) for i in range(len(rows)))
        else:
            yield from _lines(file, head, noun)


def _without_nulls(value: Any) -> Any:
    match value:
        case dict(fields):
            return {k: _without_nulls(one) for k, one in fields.items() if one is not None}
        case list(entries):
            return [_without_nulls(one) for one in entries]
    return value


def _lines(file: Path, head: bytes, noun: str) -> Iterator[tuple[str, Any]]:
    encoding, found = read_content(file, head)
    if found in {"CSV", "a JSON array"}:
        raise format_error(file, head, noun)
    with open_regular(file) as stream:
        for number, _, text in iterate_lines(stream, file, encoding):
            try:
                yield f"{file}:{number}", parse_json(text)
            except ValueError as error:
                raise DataError(
                    f"{file}:{number} is not JSON: {error}. Write each {noun} as one line of JSON, "
                    f"or remove the line."
                ) from None
