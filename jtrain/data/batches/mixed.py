"""Batches that mix sources by weight."""

import copy
import operator
from collections.abc import Mapping

import numpy as np

from jtrain.data.batches.by_step import Blocks, RowShard, add_places, count_rows
from jtrain.data.batches.proportions import Proportions
from jtrain.data.batches.shuffle import permute
from jtrain.data.sources.source import Source
from jtrain.data.text.token_files import TokenRange
from jtrain.data.text.tokenizer import check_same_tokenizer
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers


class MixedBatches:
    """`batches[step]`: `size` rows, with each source's share exact to one row.

    The shares are exact after any number of rows, so for every batch and every prefix of a run.
    Each source begins its next epoch, in another order, when its rows are used up. Steps never end,
    and a batch is a function of the seed and the step, on any number of processes.

    Args:
        parts: each source and its weight, by a name of your choice.
        size: rows a batch.
        seed: seeds the orders.

    Raises:
        DataError: an empty source, a weight that is not above 0, rows with different arrays, or
            token folders of different tokenizers.
        ConfigError: a size that is not positive or does not divide into the processes.
    """

    ragged = False

    @plain_numbers
    def __init__(
        self, parts: Mapping[str, tuple[Source, float | int]], *, size: int, seed: int = 0
    ):
        self.sources = {name: source for name, (source, _) in parts.items()}
        self.size, self.seed = size, seed
        self._shard = RowShard(size, 0, 1)
        weights = [weight for _, weight in parts.values()]
        self.proportions = Proportions(weights, list(parts))
        self._lengths = [count_rows(source) for source in self.sources.values()]
        _check_tokenizers(self.sources)
        _check_arrays(self.sources)
        self._drawn = Blocks(self._shard.row, size, self._draw)

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"Steps count from 0; batch {step} was requested.")
        source_of, rows = self._drawn[step]
        batch: dict[str, np.ndarray] = {}
        for number, source in enumerate(self.sources.values()):
            chosen = np.flatnonzero(source_of == number)
            if not len(chosen):
                continue
            for name, array in source[rows[chosen]].items():
                if name not in batch:
                    batch[name] = np.empty((len(source_of), *array.shape[1:]), array.dtype)
                batch[name][chosen] = array
        mask = self._shard.mask(self.size)
        return add_places(batch, {"row": self._shard.row, "mask": mask})

    def shard(self, index: int, count: int) -> "MixedBatches":
        """Return the same batches, with only the rows of process `index` of `count`."""
        sharded = copy.copy(self)
        sharded._shard = RowShard(self.size, index, count)
        sharded._drawn = Blocks(sharded._shard.row, self.size, self._draw)
        return sharded

    def _draw(self, places: np.ndarray) -> np.ndarray:  # s b -> s 2 b
        """Return the source and its row at each place of the endless sequence."""
        source_of, counts = self.proportions.at(places)
        rows = np.empty_like(places)
        for number, length in enumerate(self._lengths):
            chosen = source_of == number
            epochs, within = np.divmod(counts[chosen], length)
            seed = (self.seed << 16) + number  # two sources of one length get different orders
            rows[chosen] = permute(within, length, seed=seed, epoch=epochs)
        return np.stack([source_of, rows], 1)


def _check_tokenizers(sources: Mapping[str, Source]) -> None:
    """Raise DataError if token folders among the sources have different tokenizers."""
    tokens_of = [getattr(source, "tokens", None) for source in sources.values()]
    folders = [tokens.files for tokens in tokens_of if isinstance(tokens, TokenRange)]
    if folders:
        check_same_tokenizer({str(folder.path): folder.tokenizer for folder in folders})


def _check_arrays(sources: Mapping[str, Source]) -> None:
    """Raise DataError unless rows of all sources have the same arrays."""
    first = np.zeros(1, np.int64)
    described = {name: _describe_arrays(source[first]) for name, source in sources.items()}
    first_name, expected = next(iter(described.items()))
    for name, other in described.items():
        if other != expected:
            raise DataError(
                f"Rows of one batch have the same arrays, and {first_name} has {expected}, {name} "
                f"{other}. Make them alike: one context for all texts, one size for all images."
            )


def _describe_arrays(rows: Mapping[str, np.ndarray]) -> str:
    return ", ".join(
        f"{name} {rows[name].dtype}{list(rows[name].shape[1:])}" for name in sorted(rows)
    )
