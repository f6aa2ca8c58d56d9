"""Rows of a Grain data set."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrain.errors import DataError

ENDLESS = 1 << 62  # Grain gives an endless data set a length of sys.maxsize


class GrainRows:
    """Rows of a `grain.MapDataset` whose elements are dicts of arrays or, with `names`, tuples.

    Use this class for records that cost work, such as images to decode. Grain reads element by
    element (15 us each, benchmarks/input_pipeline.py); data in memory is better read by `Arrays`.
    The data set must not shuffle, repeat or batch: `Shuffled` does.

    Raises:
        DataError: a data set that can only be streamed, or elements of another kind.
    """

    def __init__(self, dataset: Any, *, names: Sequence[str] = ()):
        import grain  # imports JAX

        if not isinstance(dataset, grain.MapDataset):
            raise DataError(
                f"GrainRows reads rows by index, and a {type(dataset).__name__} can only be "
                f"streamed. Give the MapDataset before its .to_iter_dataset()."
            )
        if len(dataset) >= ENDLESS:
            raise DataError(
                "The MapDataset repeats without end. Remove its .repeat(): Shuffled repeats the "
                "rows by itself."
            )
        self.dataset, self.names = dataset, tuple(names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        rows = [self._row(index) for index in indices.tolist()]
        if all(row.keys() == rows[0].keys() for row in rows):
            with contextlib.suppress(ValueError):
                return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        first = {name: np.shape(value) for name, value in rows[0].items()}
        index, odd = next(
            (i, shapes)
            for i, row in zip(indices.tolist(), rows, strict=True)
            if (shapes := {name: np.shape(value) for name, value in row.items()}) != first
        )
        raise DataError(
            f"Elements of a batch need one shape, and element {index} has {odd} where element "
            f"{indices[0]} has {first}. Make them alike: dataset.map(crop_or_pad)."
        )

    def _row(self, index: int) -> dict[str, Any]:
        element = self.dataset[index]
        if isinstance(element, dict):
            return element
        if isinstance(element, tuple) and len(element) == len(self.names):
            return dict(zip(self.names, element, strict=True))
        if isinstance(element, tuple):
            given = ", ".join(f'"{name}"' for name in ("image", "label")[: len(element)])
            raise DataError(
                f"Element {index} is a tuple of {len(element)} and names has {len(self.names)}: "
                f"{self.names}. Name each part: GrainRows(dataset, names=[{given}])."
            )
        raise DataError(
            f"Element {index} is a {type(element).__name__}, not a dict of arrays. "
            f"Give dicts: dataset.map(lambda x: {{'image': x}}); a filter makes elements None."
        )
