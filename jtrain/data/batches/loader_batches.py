"""Batches by step from a loader that can only be streamed."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from jtrain.data.batches.by_step import RowShard, ShardedBatches, add_places, check_step
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers


class LoaderBatches(ShardedBatches):
    """`batches[step]`: the batches of a loader, which is reopened for each epoch.

    The adapter is a function that yields the batches as arrays by name:

    ```python
    def open_loader():
        for image, label in loader:
            yield {"image": image.numpy(), "label": label.numpy()}

    train = LoaderBatches(open_loader, size=64)
    ```

    A step out of order is reached by reading up to it. So a killed run resumes bit for bit if the
    loader yields the same batches each time it is opened. Each process reads all batches and keeps
    its own rows.

    Raises:
        DataError: no batch at all, or a batch with another number of rows.
    """

    ragged = False
    summary = "data: a loader, each process reads all of it and keeps its own rows of every batch"

    @plain_numbers
    def __init__(self, open_loader: Callable[[], Iterable[Mapping[str, np.ndarray]]], *, size: int):
        self.size, self._open = size, open_loader
        self._begin(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step, row = check_step(step), self._shard.row
        with self._lock:  # the run may look at a batch while a thread prefetches another
            reader = self._first if step >= self._first.earliest else self._second
            batch = reader.read(step)
        own = {name: array[row[0] : row[-1] + 1] for name, array in batch.items()}
        return add_places(own, self._shard.places(self.size))

    def _begin(self, shard: RowShard) -> None:
        self._shard, self._lock = shard, threading.Lock()
        self._first = _Reader(self._open, self.size)
        # Of batches that the run looks at again, such as those of `log.leaves`: each of the two
        # only reads on, and no look makes the other begin again.
        self._second = _Reader(self._open, self.size)


class _Reader:
    """Batches in their order; one before the last that was read opens the loader again."""

    def __init__(self, open_loader: Callable[[], Iterable[Mapping[str, np.ndarray]]], size: int):
        self._open, self._size = open_loader, size
        self._restart()

    @property
    def earliest(self) -> int:
        """The first step that is read without opening the loader again."""
        return self._next - 1

    def read(self, step: int) -> dict[str, np.ndarray]:
        """Return the arrays of a step's batch."""
        if step < self.earliest:
            self._restart()
        while self._next <= step:
            self._last = next(self._batches)
            self._next += 1
        return self._last

    def _restart(self) -> None:
        self._next, self._batches = 0, self._epochs()
        self._last: dict[str, np.ndarray] = {}

    def _epochs(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            count = 0
            for batch in self._open():
                arrays = {name: np.asarray(array) for name, array in batch.items()}
                for name, array in arrays.items():
                    self._check_rows(name, array, count)
                yield arrays
                count += 1
            if not count:
                raise DataError(
                    "A loader gave no batch. Reopen it in the function that LoaderBatches is "
                    "given: a loader that was read to its end gives nothing more."
                )

    def _check_rows(self, name: str, array: np.ndarray, number: int) -> None:
        found = array.shape[0] if array.ndim else None
        if found != self._size:
            rows = "no rows" if found is None else f"{found} rows"
            raise DataError(
                f"Batches of {self._size} rows were requested from a loader, and `{name}` of its "
                f"batch {number} has {rows}. Set its batch size to {self._size} and drop the last "
                f"batch if it is short: drop_last=True (torch), drop_remainder=True (tf.data)."
            )
