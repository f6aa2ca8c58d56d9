"""Some rows of a source: to keep a part of it back."""

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint, of_arrays
from jtrain.data.batches.shuffle import shuffled
from jtrain.data.sources.source import Source
from jtrain.errors import DataError

SPLIT = 0x5EED  # the order that a share is drawn by: the same on every machine, in every run


class Subset:
    """The rows of `source` at `indices` (int64, n), in that order; nothing is copied.

    Raises:
        DataError: an index that is not a row's.
    """

    def __init__(self, source: Source, indices: np.ndarray):
        self.source, self.indices = source, np.asarray(indices, np.int64)
        wrong = (self.indices < 0) | (self.indices >= len(source))
        if wrong.any():
            raise DataError(
                f"A subset was asked for row {self.indices[wrong][0]} of {len(source)}, counted "
                f"from 0. Leave it out: indices[indices < {len(source)}]."
            )

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return self.source[self.indices[indices]]

    def fingerprint(self) -> str:
        """What the data is, in a line."""
        return f"{of_arrays(len(self), {'': self.indices})} of {fingerprint(self.source)}"


def keep_back(source: Source, share: float) -> tuple[Subset, Subset]:
    """All rows but a `share` of them, and that share: drawn without a seed, the same every time.

    A row is in one of the two. Both keep the order of the source.

    Raises:
        DataError: if one of the two would be empty.
    """
    rows = len(source)
    kept = round(rows * share)
    if not 0 < kept < rows:
        raise DataError(
            f"validation={share} of {rows} rows was to be kept back, which is "
            f"{'none' if kept < 1 else 'all'} of them. "
            + (f"Set validation={_between(rows)}." if rows > 1 else "Give at least 2 rows.")
        )
    places = shuffled(np.arange(rows, dtype=np.int64), rows, seed=SPLIT, epoch=0)
    return Subset(source, np.sort(places[:-kept])), Subset(source, np.sort(places[-kept:]))


def _between(rows: int) -> str:
    """A share that leaves rows on both sides."""
    return "0.1" if rows >= 10 else "0.5"
