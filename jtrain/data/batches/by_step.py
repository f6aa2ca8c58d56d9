"""Batches as functions of the step: nothing to save, nothing to rewind.

Every batch has the arrays of its source, `row` (int32, b: the place in the whole batch) and `mask`
(bool, b: false where a row only fills up). These two are the same objects, batch after batch, and
read-only, so that they can be kept on the device.
"""

import copy
import operator

import numpy as np

from jtrain.data.batches.blocks import Blocks
from jtrain.data.batches.shuffle import shuffled
from jtrain.data.sources.source import Source
from jtrain.errors import ConfigError, DataError


class Shuffled:
    """`batches[step]`: `size` rows, every row once an epoch, each epoch in another order.

    Steps never end. At an epoch's end, by `end`:
        `cross`: the batch goes on with the next epoch's first rows (so a row may come twice in it).
        `drop`: the rows that do not fill a batch are left out of this epoch.
        `pad`: the last batch is filled up with rows under a false mask.

    Raises:
        DataError: no rows, or `end="drop"` with fewer rows than a batch.
        ConfigError: a size that is not positive or does not divide into the processes.
    """

    def __init__(
        self,
        source: Source,
        *,
        size: int,
        seed: int = 0,
        end: str = "cross",
    ):
        self.source, self.size, self.seed, self.end = source, size, seed, end
        self.rows = rows_of(source)
        self._part = RowShard(size, 0, 1)
        if end not in ("cross", "drop", "pad"):
            raise ConfigError(f"end {end!r} is none of cross, drop, pad. Set end=cross.")
        if end == "drop" and size > self.rows:
            raise DataError(
                f"A batch of {size} was asked of {self.rows} rows with end=drop: every epoch would "
                f"be dropped whole. Set batch={self.rows} or less, or end=cross."
            )
        self.ragged = end == "pad" and self.rows % size > 0
        steps = self.rows // size if end == "drop" else -(-self.rows // size)
        self._epoch = self.rows if end == "cross" else steps * size  # places
        self._indices = Blocks(self._part.row, size, self._order)

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"Steps count from 0; batch {step} was asked for.")
        mask = self._part.mask(self._real(step))
        return self.source[self._indices[step]] | {"row": self._part.row, "mask": mask}

    def several(self, step: int, count: int) -> dict[str, np.ndarray]:
        """The batches of `count` steps from `step` on, stacked, k b ...: read at once."""
        steps = range(step, step + count)
        indices = np.stack([self._indices[each] for each in steps])  # k b
        rows = self.source[indices.ravel()].items()
        stacked = {name: array.reshape(*indices.shape, *array.shape[1:]) for name, array in rows}
        masks = [self._part.mask(self._real(each)) for each in steps]
        same = all(mask is masks[0] for mask in masks)
        mask = self._part.stacked(masks[0], count) if same else np.stack(masks)
        return stacked | {"row": self._part.stacked(self._part.row, count), "mask": mask}

    def indices(self, step: int) -> np.ndarray:
        """Which rows of the source a step's batch has; those that this process reads."""
        return self._indices[step]

    def shard(self, index: int, count: int) -> "Shuffled":
        """The same batches, of which only the rows of process `index` of `count` are read."""
        mine = copy.copy(self)
        mine._part = RowShard(self.size, index, count)
        mine._indices = Blocks(mine._part.row, self.size, self._order)
        return mine

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, of the first row of a step's batch."""
        return step * self.size // self._epoch

    def _real(self, step: int) -> int:
        """How many rows of a step's batch are no padding."""
        return min(
            self.size, self.rows - step * self.size % self._epoch if self.ragged else self.size
        )

    def _order(self, places: np.ndarray) -> np.ndarray:
        """The row of the source at each place of the endless sequence of epochs."""
        epochs, places = np.divmod(places, self._epoch)
        places = np.minimum(places, self.rows - 1)  # padding repeats an epoch's last row
        return shuffled(places, self.rows, seed=self.seed, epoch=epochs)


class InOrder:
    """A whole source once, in its order: `len` batches, the last filled up under a false mask.

    Raises:
        DataError: no rows.
        ConfigError: a size that is not positive or does not divide into the processes.
    """

    def __init__(self, source: Source, *, size: int):
        self.source, self.size = source, size
        self.rows = rows_of(source)
        self._part = RowShard(size, 0, 1)
        self.ragged = self.rows % size > 0

    def __len__(self) -> int:
        return -(-self.rows // self.size)

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step = operator.index(step)
        if not 0 <= step < len(self):
            raise IndexError(f"Batch {step} was asked of {len(self)}, counted from 0.")
        first = step * self.size
        indices = np.minimum(first + self._part.row.astype(np.int64), self.rows - 1)
        mask = self._part.mask(min(self.size, self.rows - first))
        return self.source[indices] | {"row": self._part.row, "mask": mask}

    def shard(self, index: int, count: int) -> "InOrder":
        """The same batches, of which only the rows of process `index` of `count` are read."""
        mine = copy.copy(self)
        mine._part = RowShard(self.size, index, count)
        return mine


class RowShard:
    """The rows of a batch that one process reads: a slice of them."""

    def __init__(self, size: int, index: int, count: int):
        if size < 1:
            raise ConfigError(f"A batch of {size} rows was asked for. Set batch=1 or more.")
        if not 0 <= index < count:
            raise ConfigError(
                f"Process {index} of {count} was asked for; processes count from 0. "
                f"Set an index in 0 .. {count - 1}."
            )
        share, rest = divmod(size, count)
        if rest:
            lower, upper = share * count, (share + 1) * count
            nearest = f"{lower} or {upper} (batch={lower})" if lower else f"batch={upper}"
            raise ConfigError(
                f"batch {size} does not divide into {count} processes. Nearest: {nearest}."
            )
        self.row = _read_only(np.arange(index * share, (index + 1) * share, dtype=np.int32))
        self._masks: dict[int, np.ndarray] = {}
        self._stacks: dict[tuple[int, int], np.ndarray] = {}

    def mask(self, real: int) -> np.ndarray:
        """True in the first `real` rows of the whole batch; the same object every time."""
        if real not in self._masks:
            self._masks[real] = _read_only(self.row < real)
        return self._masks[real]

    def stacked(self, array: np.ndarray, count: int) -> np.ndarray:
        """`array` (one that this object keeps) `count` times; the same object every time."""
        key = id(array), count
        if key not in self._stacks:
            self._stacks[key] = _read_only(np.tile(array, (count, 1)))
        return self._stacks[key]


def rows_of(source: Source) -> int:
    """How many rows a source has; raises a DataError if none."""
    if rows := len(source):
        return rows
    raise DataError(
        f"The data set is empty: {type(source).__name__} has 0 rows. "
        f"Check the path or the filter that made it; a batch needs at least 1 row."
    )


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
