"""Full batches: the complete data set at every step, for optimizers such as L-BFGS."""

import numpy as np

from jtrain.data.batches.by_step import InOrder
from jtrain.data.sources.source import Source


class FullBatches:
    """`batches[step]`: every row of `source` in its order, the same arrays at each step.

    The arrays are read once and are read-only, so that they are put on the devices once.

    Raises:
        DataError: no rows.
    """

    ragged = False

    def __init__(self, source: Source):
        self.source, self.size = source, len(source)
        self._rows = InOrder(source, size=self.size)
        self._batch: dict[str, np.ndarray] = {}

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        if step < 0:
            raise IndexError(f"Steps count from 0; batch {step} was requested.")
        if not self._batch:
            batch = self._rows[0]
            for array in batch.values():
                array.setflags(write=False)
            self._batch = batch  # one assignment: a thread sees no batch or all of it
        return self._batch

    def shard(self, index: int, count: int) -> "FullBatches":
        """Return the same batch, with only the rows of process `index` of `count`."""
        sharded = FullBatches(self.source)
        sharded._rows = self._rows.shard(index, count)
        return sharded
