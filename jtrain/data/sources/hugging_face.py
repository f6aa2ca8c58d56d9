"""Rows of a Hugging Face data set; needs `pip install 'jtrain[hf]'`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrain.data.sources.foreign import to_array
from jtrain.data.sources.source import import_optional
from jtrain.errors import DataError

TENSORS = {"numpy", "torch", "tensorflow", "jax"}  # formats whose dtype is used


class HuggingFace:
    """The rows of a `datasets.Dataset`: numbers, lists of one length and images of one size.

    A batch is read from the Arrow tables in one call, in the format of the data set: its columns,
    its dtype, or its transform (`with_transform`), which must return the same rows whenever it is
    called. The data set must not be shuffled or repeated: `Shuffled` does.

    Args:
        dataset: the result of `load_dataset(..., split="train")` or `load_from_disk`.
        columns: the columns to read; empty: those of the format, or of the transform's result.

    Raises:
        DataError: a dict of splits, a data set that can only be streamed, a column that does not
            exist or holds no numbers, None in a row, rows of different shapes, a transform that
            drops rows; or `datasets` is not installed.
    """

    def __init__(self, dataset: Any, *, columns: Sequence[str] = ()):
        package = import_optional("datasets", "hf", "A Hugging Face data set")
        if isinstance(dataset, dict):  # a DatasetDict is one
            raise DataError(
                f"One split is needed, and this data set has {', '.join(dataset)}. "
                f"Choose: HuggingFace(dataset[{next(iter(dataset), 'train')!r}])."
            )
        if not isinstance(dataset, package.Dataset):
            raise DataError(
                f"HuggingFace reads rows by index, and a {type(dataset).__name__} can only be "
                f"streamed. Load it without streaming=True."
            )
        format_, names = dataset.format, dataset.column_names
        self.columns, self._dataset, self._holed = list(columns), dataset, list[str]()
        if format_["type"] == "custom":
            return  # the columns are those that the transform returns
        _check_names(columns, names, "the data set")
        self.columns = self.columns or (
            names if format_["output_all_columns"] else format_["columns"]
        )
        kind = format_["type"] if format_["type"] in TENSORS else "numpy"
        options = format_["format_kwargs"] if kind == format_["type"] else {}
        selected = dataset.select_columns(self.columns)
        self._dataset = selected.with_format(kind, **options)
        self._plain = selected.with_format(None)
        table = dataset.data  # all rows, also those that a filter leaves out
        self._holed = [n for n in self.columns if any(map(_has_nulls, table.column(n).chunks))]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        if self._holed:
            self._check_values(indices)
        rows = self._dataset[indices]
        _check_names(self.columns, list(rows), "a row after the transform")
        arrays = {name: _numbers(name, rows[name]) for name in self.columns or rows}
        for name, array in arrays.items():
            if len(array) != len(indices):
                raise DataError(
                    f"The transform of the data set was given {len(indices)} rows and returned "
                    f"{len(array)} of {name!r}. Change the number of rows beforehand: "
                    f"dataset.map(transform, batched=True)."
                )
        return arrays

    def _check_values(self, indices: np.ndarray) -> None:
        """Raise DataError if a row has no value in a column of numbers."""
        rows = self._plain.select_columns(self._holed)[indices]
        for name in self._holed:
            for row in (i for i, x in zip(indices, rows[name], strict=True) if _has_none(x)):
                raise DataError(
                    f"Column {name!r} has None in row {row} of the data set, and numbers are "
                    f"needed. Leave such rows out, dataset.filter(lambda row: 'None' not in "
                    f"str(row[{name!r}])), or give them a value: dataset.map(fill)."
                )


def _check_names(wanted: Sequence[str], found: Sequence[str], what: str) -> None:
    if unknown := [name for name in wanted if name not in found]:
        raise DataError(
            f"Column {unknown[0]!r} was requested, and {what} has {', '.join(found)}. "
            f"Set columns={list(found)[:2]}."
        )


def _has_nulls(array: Any) -> bool:
    """Return whether an Arrow array has nulls, at any depth of lists."""
    inner = (getattr(array, name, None) for name in ("storage", "values"))
    return bool(array.null_count) or any(_has_nulls(each) for each in inner if each is not None)


def _has_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_has_none, value)))


def _numbers(name: str, column: Any) -> np.ndarray:  # b ...
    values = to_array(column)
    if isinstance(values, list | tuple):
        values = [to_array(value) for value in values]
    try:
        array = np.array(values)
    except ValueError:  # rows of several shapes
        array = np.array(None)
    if array.dtype.kind in "biuf":
        return array
    if array.dtype.kind == "O" and len(shapes := {_shape(value) for value in values}) > 1:
        found = " and ".join(sorted(shapes)[:2])
        raise DataError(
            f"Rows of a batch need one shape, and column {name!r} has {found}. "
            f"Make them alike: dataset.map(crop_or_pad)."
        )
    other = next((value for value in values if not isinstance(value, int | float)), values[0])
    raise DataError(
        f"Column {name!r} should hold numbers and holds {type(other).__name__}. Leave it out "
        f"(columns=[...]), or convert it to numbers: dataset.map(encode)."
    )


def _shape(value: Any) -> str:
    try:
        return str(np.shape(value))
    except ValueError:
        return f"({len(value)}, several lengths)"
