"""What many steps need, computed at once."""

from collections.abc import Callable

import numpy as np

PLACES = 16384  # at once: an order of 128 rows costs 10 us so, and 500 us when computed alone


class Blocks:
    """`blocks[step]`: of what `make` gives for a block of steps, this step's; the block is kept.

    Args:
        row: the places of a batch that are asked for, int32, b.
        size: places in a whole batch.
        make: gives an array (s ...) for places in the endless sequence of rows (int64, s b).
    """

    def __init__(self, row: np.ndarray, size: int, make: Callable[[np.ndarray], np.ndarray]):
        self._row, self._size, self._make = row, size, make
        self._steps = max(1, PLACES // len(row))
        self._kept: tuple[int, np.ndarray] = -1, np.empty(0)

    def __getitem__(self, step: int, /) -> np.ndarray:
        block, here = divmod(step, self._steps)
        number, made = self._kept
        if number != block:
            steps = np.arange(block * self._steps, (block + 1) * self._steps, dtype=np.int64)
            made = self._make(steps[:, None] * self._size + self._row)
            self._kept = block, made  # one assignment: a reading thread sees old or new
        return made[here]
