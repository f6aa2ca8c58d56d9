"""Batches that mix sources by weight."""

import copy
import operator
from collections.abc import Mapping

import numpy as np

from jtrain.data.batches.blocks import Blocks
from jtrain.data.batches.by_step import RowShard, rows_of
from jtrain.data.batches.proportions import Proportions
from jtrain.data.batches.shuffle import shuffled
from jtrain.data.sources.source import Source
from jtrain.data.text.token_files import TokenRange
from jtrain.data.text.tokenizer import refuse_mismatch
from jtrain.errors import DataError


class MixedBatches:
    """`batches[step]`: `size` rows, of which each source has its share, exact to one row.

    That holds after any number of rows, so for every batch and every prefix of a run. A source
    that comes to its end begins its next epoch, in another order, whatever the others do. Steps
    never end, and a batch is a function of the seed and the step, on any number of processes.

    Args:
        parts: each source and its weight, by a name of yours.
        size: rows a batch.
        seed: of the orders.

    Raises:
        DataError: an empty source, a weight that is not above 0, rows that do not go together, or
            token folders of different tokenizers.
        ConfigError: a size that is not positive or does not divide into the processes.
    """

    ragged = False

    def __init__(
        self, parts: Mapping[str, tuple[Source, float | int]], *, size: int, seed: int = 0
    ):
        self.sources = {name: source for name, (source, _) in parts.items()}
        self.size, self.seed = size, seed
        self._part = RowShard(size, 0, 1)
        weights = [weight for _, weight in parts.values()]
        self.proportions = Proportions(weights, list(parts))
        self._lengths = [rows_of(source) for source in self.sources.values()]
        _refuse_two_tokenizers(self.sources)
        _refuse_unlike(self.sources)
        self._drawn = Blocks(self._part.row, size, self._draw)

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"Steps count from 0; batch {step} was asked for.")
        of, rows = self._drawn[step]
        batch: dict[str, np.ndarray] = {}
        for number, source in enumerate(self.sources.values()):
            here = np.flatnonzero(of == number)
            if not len(here):
                continue
            for name, array in source[rows[here]].items():
                if name not in batch:
                    batch[name] = np.empty((len(of), *array.shape[1:]), array.dtype)
                batch[name][here] = array
        return batch | {"row": self._part.row, "mask": self._part.mask(self.size)}

    def shard(self, index: int, count: int) -> "MixedBatches":
        """The same batches, of which only the rows of process `index` of `count` are read."""
        mine = copy.copy(self)
        mine._part = RowShard(self.size, index, count)
        mine._drawn = Blocks(mine._part.row, self.size, self._draw)
        return mine

    def _draw(self, places: np.ndarray) -> np.ndarray:  # s b -> s 2 b
        """Of each place of the endless sequence its source, and the row of that."""
        of, counts = self.proportions.at(places)
        rows = np.empty_like(places)
        for number, length in enumerate(self._lengths):
            here = of == number
            epochs, within = np.divmod(counts[here], length)
            seed = (self.seed << 16) + number  # two sources as long as one another differ
            rows[here] = shuffled(within, length, seed=seed, epoch=epochs)
        return np.stack([of, rows], 1)


def _refuse_two_tokenizers(sources: Mapping[str, Source]) -> None:
    """Raises if token folders among the sources were written by different tokenizers."""
    read = [getattr(source, "tokens", None) for source in sources.values()]
    folders = [tokens.files for tokens in read if isinstance(tokens, TokenRange)]
    if folders:
        refuse_mismatch({str(folder.path): folder.tokenizer for folder in folders})


def _refuse_unlike(sources: Mapping[str, Source]) -> None:
    """Raises unless rows of all sources have the same arrays."""
    first = np.zeros(1, np.int64)
    known = {name: _spelt(source[first]) for name, source in sources.items()}
    one, spelt = next(iter(known.items()))
    for name, other in known.items():
        if other != spelt:
            raise DataError(
                f"Rows of one batch have the same arrays, and {one} has {spelt}, {name} {other}. "
                f"Make them alike: one context for all texts, one size for all images."
            )


def _spelt(rows: Mapping[str, np.ndarray]) -> str:
    return ", ".join(
        f"{name} {rows[name].dtype}{list(rows[name].shape[1:])}" for name in sorted(rows)
    )
