"""Batches that mix sources by weight, in exact proportions."""

import math
import numbers
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from jtrain.data.batches.by_step import (
    Blocks,
    RowShard,
    ShardedBatches,
    add_places,
    check_step,
    count_rows,
)
from jtrain.data.batches.shuffle import permute
from jtrain.data.sources.arrays import read_interleaved
from jtrain.data.sources.source import Source
from jtrain.data.text.token_files import TokenRange
from jtrain.data.text.tokenizers import check_same_tokenizer
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers

LONGEST = 100_000  # places before the sequence must repeat


class Proportions:
    """Sources 0 .. k-1 by weight: any prefix has each source's share, less than one place off.

    The weights as written, reduced to the smallest integers, give the period: 7 : 2 : 1 repeats
    after 10 places. So any place can be computed without the places before it.

    Source: the places are jobs with a release and a deadline, the earliest deadline first, which
    keeps each count within one of its share: Steiner and Yeomans 1993, Management Science 39.

    Raises:
        DataError: a weight that is not above 0, or weights whose period is too long.
    """

    def __init__(self, weights: Sequence[float | int], names: Sequence[str] = ()):
        names = names or [str(number) for number in range(len(weights))]
        counts = _integer_weights(weights, names)
        self.period = sum(counts)
        self._counts = np.array(counts)
        self._source = _sequence(counts)
        taken = self._source[:, None] == np.arange(len(counts))
        self._before = np.cumsum(taken, 0) - taken  # places of each source before each place

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each of `places` (int64, b), and its count before that; both b."""
        rounds, offset = np.divmod(places, self.period)
        source = self._source[offset]
        return source, rounds * self._counts[source] + self._before[offset, source]


def _sequence(counts: Sequence[int]) -> np.ndarray:  # sum of the counts
    """Repeat each source as often as its count, spread so that every prefix has its share."""
    total, placed, sequence = sum(counts), [0] * len(counts), []
    sources = range(len(counts))
    for place in range(total):
        # A source may come next once its share exceeds its count so far, and must come before its
        # share exceeds that count by one.
        eligible = [
            i
            for i in sources
            if placed[i] < counts[i] and placed[i] * total < (place + 1) * counts[i]
        ]
        chosen = min(eligible, key=lambda i: (-((placed[i] + 1) * total // -counts[i]), i))
        placed[chosen] += 1
        sequence.append(chosen)
    return np.array(sequence)


def _integer_weights(weights: Sequence[float | int], names: Sequence[str]) -> list[int]:
    """Return the weights as the smallest integers in the same ratio."""
    if not len(weights):
        raise DataError("A mixture of no sources was requested. Give at least one.")
    for name, weight in zip(names, weights, strict=True):
        if not (isinstance(weight, numbers.Real) and math.isfinite(weight) and weight > 0):
            raise DataError(
                f"The weight of {name} is {weight!s}, and a weight must be above 0. Set weight=1, "
                f"or leave {name} out of the mixture."
            )
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth
    measure = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * measure) for weight in exact]
    integers = [count // math.gcd(*integers) for count in integers]
    if sum(integers) > LONGEST:
        rounded = [max(1, round(1000 * count / sum(integers))) for count in integers]
        advice = ", ".join(f"{name} {count}" for name, count in zip(names, rounded, strict=True))
        raise DataError(
            f"The weights {', '.join(map(str, weights))} are exact only over {sum(integers):,} "
            f"rows, more than {LONGEST:,}. Round them: {advice}."
        )
    return integers


class MixedBatches(ShardedBatches):
    """`batches[step]`: `size` rows, with each source's share exact to one row.

    The shares are exact after any number of rows, so for every batch and every prefix of a run.
    Each source begins its next epoch, in another order, when its rows are used up. Steps never end,
    and a batch is a function of the seed and the step, on any number of processes.

    Args:
        parts: each source and its weight, by a name of your choice.

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
        weights = [weight for _, weight in parts.values()]
        self.proportions = Proportions(weights, list(parts))
        self._lengths = [count_rows(source) for source in self.sources.values()]
        tokens = [getattr(source, "tokens", None) for source in self.sources.values()]
        if folders := [each.files for each in tokens if isinstance(each, TokenRange)]:
            check_same_tokenizer({str(folder.path): folder.tokenizer for folder in folders})
        first = np.arange(len(parts)), np.zeros(len(parts), np.int64)
        read_interleaved(self.sources, *first)  # raises if their rows have other arrays
        self._begin(RowShard(size, 0, 1))

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        source_of, rows = self._drawn[check_step(step)]
        batch = read_interleaved(self.sources, source_of, rows)
        return add_places(batch, self._shard.places(self.size))

    def _begin(self, shard: RowShard) -> None:
        self._shard, self._drawn = shard, Blocks(shard.row, self.size, self._draw)

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
