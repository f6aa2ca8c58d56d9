"""Rows of a Hugging Face data set; needs `pip install 'jtrain[hf]'`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrain.data.sources.source import import_optional
from jtrain.errors import DataError


class HuggingFace:
    """The rows of a `datasets.Dataset`: numbers, lists of one length and images of one size.

    A batch is read from the Arrow tables in one call. The data set must not be shuffled or
    repeated: `Shuffled` does.

    Args:
        dataset: the result of `load_dataset(..., split="train")` or `load_from_disk`.
        columns: the columns to read; empty: all.

    Raises:
        DataError: a dict of splits, a data set that can only be streamed, a column that does not
            exist or holds no numbers, rows of different shapes; or `datasets` is not installed.
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
        if unknown := [name for name in columns if name not in dataset.column_names]:
            raise DataError(
                f"Column {unknown[0]!r} was requested, and the data set has "
                f"{', '.join(dataset.column_names)}. Set columns={dataset.column_names[:2]}."
            )
        self.columns = list(columns) or dataset.column_names
        self._dataset = dataset.select_columns(self.columns).with_format("numpy")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        rows = self._dataset[indices]
        return {name: _numbers(name, rows[name]) for name in self.columns}


def _numbers(name: str, column: Any) -> np.ndarray:  # b ...
    array = np.array(column)
    if array.dtype.kind in "biuf":
        return array
    if array.dtype.kind == "O" and len(shapes := {np.shape(value) for value in column}) > 1:
        found = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise DataError(
            f"Rows of a batch need one shape, and column {name!r} has {found}. "
            f"Make them alike: dataset.map(crop_or_pad)."
        )
    raise DataError(
        f"Column {name!r} should hold numbers and holds {type(column[0]).__name__}. Leave it out "
        f"(columns=[...]), or convert it to numbers: dataset.map(encode)."
    )
