"""Batches of a loader that only streams, by step."""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from jtrain.data.batches.by_step import RowShard
from jtrain.errors import DataError


class LoaderBatches:
    """`batches[step]`: what a loader gives, opened anew for each epoch.

    The adapter is a function that gives its batches as arrays by name:

    ```python
    def opened():
        for image, label in loader:
            yield {"image": image.numpy(), "label": label.numpy()}

    train = Loaded(opened, size=64)
    ```

    A step out of turn is found by reading up to it. So a run that was killed goes on bit for bit if
    the loader gives the same batches each time it is opened, and each process, which reads all of
    them, keeps rows of its own.

    Raises:
        DataError: no batch at all, or one of another number of rows.
    """

    ragged = False
    told = "data: a loader, each process reads all of it and keeps its own rows of every batch"

    def __init__(self, opened: Callable[[], Iterable[Mapping[str, np.ndarray]]], *, size: int):
        self.size, self._opened = size, opened
        self._begin(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"Steps count from 0; batch {step} was asked for.")
        if step < self._next - 1:
            self._begin(self._part)
        while self._next <= step:
            self._last = next(self._batches)
            self._next += 1
        row = self._part.row
        mine = {name: array[row[0] : row[-1] + 1] for name, array in self._last.items()}
        return mine | {"row": row, "mask": self._part.mask(self.size)}

    def shard(self, index: int, count: int) -> "LoaderBatches":
        """The same batches, of which only the rows of process `index` of `count` are kept."""
        mine = copy.copy(self)
        mine._begin(RowShard(self.size, index, count))
        return mine

    def _begin(self, part: RowShard) -> None:
        self._part, self._next = part, 0
        self._batches = self._epochs()
        self._last: dict[str, np.ndarray] = {}

    def _epochs(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            count = 0
            for batch in self._opened():
                arrays = {name: np.asarray(array) for name, array in batch.items()}
                for name, array in arrays.items():
                    self._refuse(name, array, count)
                yield arrays
                count += 1
            if not count:
                raise DataError(
                    "A loader gave no batch. Open it anew in the function that Loaded is given: "
                    "one that was read to its end gives nothing more."
                )

    def _refuse(self, name: str, array: np.ndarray, number: int) -> None:
        found = array.shape[0] if array.ndim else None
        if found != self.size:
            rows = "no rows" if found is None else f"{found} rows"
            raise DataError(
                f"Batches of {self.size} rows were asked of a loader, and `{name}` of its batch "
                f"{number} has {rows}. Set its batch size to {self.size} and leave the last out if "
                f"it is short: drop_last=True (torch), drop_remainder=True (tf.data)."
            )
