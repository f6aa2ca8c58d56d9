"""Batches as functions of the step: nothing to save, nothing to rewind.

Every batch has the arrays of its source, `row` (int32, b: the place in the global batch) and
`mask` (bool, b: false for padding). `row` and `mask` are the same read-only objects in every
batch, so that they can stay on the device.
"""

import abc
import copy
import operator
from collections.abc import Callable, Mapping
from typing import Self

import numpy as np

from jtrain.data.batches.shuffle import permute
from jtrain.data.sources.source import Source, to_native
from jtrain.errors import ConfigError, DataError
from jtrain.errors.plain_numbers import plain_numbers

PLACES = 16384  # at once: the order of 128 rows costs 10 us this way, 500 us when computed alone


class Blocks:
    """`blocks[step]`: the value of `make` for a step, computed for a block of steps and cached.

    Args:
        row: the places of a batch that are read, int32, b.
        size: places in the global batch.
        make: returns an array (s ...) for places in the endless sequence of rows (int64, s b).
    """

    def __init__(self, row: np.ndarray, size: int, make: Callable[[np.ndarray], np.ndarray]):
        self._row, self._size, self._make = row, size, make
        self._steps = max(1, PLACES // len(row))
        self._cached: tuple[int, np.ndarray] = -1, np.empty(0)

    def __getitem__(self, step: int, /) -> np.ndarray:
        block, offset = divmod(step, self._steps)
        cached_block, values = self._cached
        if cached_block != block:
            steps = np.arange(block * self._steps, (block + 1) * self._steps, dtype=np.int64)
            values = self._make(steps[:, None] * self._size + self._row)
            # One assignment: a thread sees the old block or the new.
            self._cached = block, values
        return values[offset]


class ShardedBatches(abc.ABC):
    """Batches of `size` rows, of which a process reads its own rows."""

    size: int

    def shard(self, index: int, count: int) -> Self:
        """Return the same batches, with only the rows of process `index` of `count`."""
        sharded = copy.copy(self)
        sharded._begin(RowShard(self.size, index, count))
        return sharded

    @abc.abstractmethod
    def _begin(self, shard: "RowShard") -> None:
        """Read only these rows of each batch."""


class Shuffled(ShardedBatches):
    """`batches[step]`: `size` rows, every row once an epoch, each epoch in another order.

    Steps never end. At an epoch's end, by `end`:
        `cross`: the batch continues with the next epoch's first rows (a row may occur twice).
        `drop`: the rows that do not fill a batch are skipped in this epoch.
        `pad`: the last batch is padded with rows whose mask is false.

    Raises:
        DataError: no rows, or `end="drop"` with fewer rows than a batch.
        ConfigError: a size that is not positive or does not divide into the processes.
    """

    @plain_numbers
    def __init__(
        self,
        source: Source,
        *,
        size: int,
        seed: int = 0,
        end: str = "cross",
    ):
        self.source, self.size, self.seed, self.end = source, size, seed, end
        self.rows = count_rows(source)
        if end not in ("cross", "drop", "pad"):
            raise ConfigError(f"end {end!r} is not one of cross, drop, pad. Set end=cross.")
        if end == "drop" and size > self.rows:
            raise DataError(
                f"A batch of {size} was requested from {self.rows} rows with end=drop: every epoch "
                f"would be dropped entirely. Set batch={self.rows} or less, or end=cross."
            )
        self.ragged = end == "pad" and self.rows % size > 0
        steps = self.rows // size if end == "drop" else -(-self.rows // size)
        self._epoch = self.rows if end == "cross" else steps * size  # places
        self._begin(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        places = self.places(step)
        return add_places(read_rows(self.source, self._indices[operator.index(step)]), places)

    def places(self, step: int) -> dict[str, np.ndarray]:
        """Return `row` and `mask` of a step's batch."""
        return self._shard.places(self._real_rows(check_step(step)))

    def read_stacked(self, step: int, count: int) -> dict[str, np.ndarray]:
        """Return the batches of `count` steps from `step` on, stacked, k b ...: one read."""
        steps = range(step, step + count)
        indices = np.stack([self._indices[each] for each in steps])  # k b
        rows = read_rows(self.source, indices.ravel()).items()
        stacked = {name: array.reshape(*indices.shape, *array.shape[1:]) for name, array in rows}
        masks = [self._shard.mask(self._real_rows(each)) for each in steps]
        same = all(mask is masks[0] for mask in masks)
        mask = self._shard.stack(masks[0], count) if same else np.stack(masks)
        row = self._shard.stack(self._shard.row, count)
        return add_places(stacked, {"row": row, "mask": mask})

    def indices(self, step: int) -> np.ndarray:
        """Return the rows of the source that this process reads for a step."""
        return self._indices[step]

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, of the first row of a step's batch."""
        return step * self.size // self._epoch

    def _begin(self, shard: "RowShard") -> None:
        self._shard = shard
        self._indices = Blocks(shard.row, self.size, self._rows_at)

    def _real_rows(self, step: int) -> int:
        """Return the number of rows of a step's batch that are not padding."""
        return min(
            self.size, self.rows - step * self.size % self._epoch if self.ragged else self.size
        )

    def _rows_at(self, places: np.ndarray) -> np.ndarray:
        """Return the row of the source at each place of the endless sequence of epochs."""
        epochs, places = np.divmod(places, self._epoch)
        places = np.minimum(places, self.rows - 1)  # padding repeats an epoch's last row
        return permute(places, self.rows, seed=self.seed, epoch=epochs)


class InOrder(ShardedBatches):
    """A complete source once, in its order: `len` batches, the last padded under a false mask.

    Raises:
        DataError: no rows.
        ConfigError: a size that is not positive or does not divide into the processes.
    """

    @plain_numbers
    def __init__(self, source: Source, *, size: int):
        self.source, self.size = source, size
        self.rows = count_rows(source)
        self._begin(RowShard(size, 0, 1))
        self.ragged = self.rows % size > 0

    def __len__(self) -> int:
        return -(-self.rows // self.size)

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step = operator.index(step)
        if not 0 <= step < len(self):
            raise IndexError(f"Batch {step} was requested of {len(self)}, counted from 0.")
        first = step * self.size
        indices = np.minimum(first + self._shard.row.astype(np.int64), self.rows - 1)
        places = self._shard.places(min(self.size, self.rows - first))
        return add_places(read_rows(self.source, indices), places)

    def _begin(self, shard: "RowShard") -> None:
        self._shard = shard


class RowShard:
    """The rows of a batch that one process reads: a slice of them."""

    def __init__(self, size: int, index: int, count: int):
        if size < 1:
            raise ConfigError(f"A batch of {size} rows was requested. Set batch=1 or more.")
        if not 0 <= index < count:
            raise ConfigError(
                f"Process {index} of {count} was requested; processes count from 0. "
                f"Set an index in 0 .. {count - 1}."
            )
        share, rest = divmod(size, count)
        if rest:
            lower, upper = share * count, (share + 1) * count
            nearest = f"{lower} or {upper} (batch={lower})" if lower else f"batch={upper}"
            raise ConfigError(
                f"batch {size} does not divide into {count} processes. Nearest: {nearest}."
            )
        self.index, self.count = index, count
        self.row = _read_only(np.arange(index * share, (index + 1) * share, dtype=np.int32))
        self._masks: dict[int, np.ndarray] = {}
        self._stacks: dict[tuple[int, int], np.ndarray] = {}

    def mask(self, real: int) -> np.ndarray:
        """Return True in the first `real` rows of the global batch; the same object every time."""
        if real not in self._masks:
            self._masks[real] = _read_only(self.row < real)
        return self._masks[real]

    def places(self, real: int) -> dict[str, np.ndarray]:
        """Return `row`, and the `mask` of `real` rows of the global batch."""
        return {"row": self.row, "mask": self.mask(real)}

    def stack(self, array: np.ndarray, count: int) -> np.ndarray:
        """Return `array` (`row` or a mask) `count` times; the same object every time."""
        key = id(array), count
        if key not in self._stacks:
            self._stacks[key] = _read_only(np.repeat(array[None], count, axis=0))
        return self._stacks[key]


def check_step(step: int) -> int:
    """Return a step as an int.

    Raises:
        IndexError: if it is below 0.
    """
    step = operator.index(step)
    if step < 0:
        raise IndexError(f"Steps count from 0; batch {step} was requested.")
    return step


def add_places(
    rows: Mapping[str, np.ndarray], places: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the rows of a source with the `row` and `mask` of their batch.

    Raises:
        DataError: if the rows have arrays of these names, such as the masks of a segmentation, or
            of a dtype that JAX has not.
    """
    if taken := rows.keys() & places.keys():
        name = min(taken)
        raise DataError(
            f"The data has an array called {name!r}, a name that jtrain adds to every batch. Give "
            f"it another name where the rows are made, such as {name}s."
        )
    return {name: to_native(name, array) for name, array in rows.items()} | {**places}


def read_rows(source: Source, indices: np.ndarray) -> Mapping[str, np.ndarray]:
    """Return the rows of a source at some indices.

    Raises:
        DataError: if the source takes one index, or returns no arrays by name.
    """
    cause = None
    try:
        rows = source[indices]
    except (TypeError, ValueError, LookupError) as error:  # how a source of one index refuses them
        try:
            source[int(indices[0])]  # pyright: ignore[reportArgumentType]
        except Exception:
            raise error from None
        rows = cause = error
    if isinstance(rows, Mapping):
        return rows
    raise DataError(
        f"{type(source).__name__}[indices] gives a {type(rows).__name__}, and a source takes an "
        f"array of indices and returns arrays by name, a row for each. Write in its __getitem__, "
        f"where self.row(i) is a row, as a dict: rows = [self.row(i) for i in indices]; return "
        f"{{name: np.stack([row[name] for row in rows]) for name in rows[0]}}"
    ) from cause


def count_rows(source: Source) -> int:
    """Return the number of rows of a source; raise a DataError if it has none."""
    if rows := len(source):
        return rows
    raise DataError(
        f"The data set is empty: {type(source).__name__} has 0 rows. "
        f"Check the path or the filter that made it; a batch needs at least 1 row."
    )


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
