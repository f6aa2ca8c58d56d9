"""Exact proportions: the source of each place in an endless sequence."""

import math
import numbers
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jtrain.errors import DataError

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
        is_number = isinstance(weight, numbers.Real)
        if not (is_number and math.isfinite(weight) and weight > 0):
            raise DataError(
                f"The weight of {name} is {weight if is_number else repr(weight)}, and a weight "
                f"must be above 0. Set weight=1, or leave {name} out of the mixture."
            )
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth
    measure = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * measure) for weight in exact]
    integers = [count // math.gcd(*integers) for count in integers]
    if sum(integers) > LONGEST:
        rounded = [max(1, round(1000 * count / sum(integers))) for count in integers]
        written = ", ".join(f"{name} {weight}" for name, weight in zip(names, weights, strict=True))
        advice = ", ".join(f"{name} {count}" for name, count in zip(names, rounded, strict=True))
        raise DataError(
            f"The weights {written} are exact only over {sum(integers):,} rows, more than "
            f"{LONGEST:,}. Round them: {advice}."
        )
    return integers
