"""Which of several sources each place of an endless sequence takes, in exact proportions."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jtrain.errors import DataError

LONGEST = 100_000  # places before the sequence repeats


class Proportions:
    """Sources 0 .. k-1 by weight: after any number of places each has its share, less than one off.

    The sequence repeats after as many places as the weights, as written, have a common measure:
    7 : 2 : 1 after 10. So any place is known without those before it.

    Source: the places are jobs with a release and a deadline, the earliest deadline first, which
    keeps each count within one of its share: Steiner and Yeomans 1993, Management Science 39.

    Raises:
        DataError: a weight that is not above 0, or weights with no short common measure.
    """

    def __init__(self, weights: Sequence[float | int], names: Sequence[str] = ()):
        names = names or [str(number) for number in range(len(weights))]
        counts = _whole(weights, names)
        self.period = sum(counts)
        self._counts = np.array(counts)
        self._source = _sequence(counts)
        taken = self._source[:, None] == np.arange(len(counts))
        self._before = np.cumsum(taken, 0) - taken  # places of each source before each place

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each of `places` (int64, b) its source, and how often that came before; both b."""
        rounds, here = np.divmod(places, self.period)
        source = self._source[here]
        return source, rounds * self._counts[source] + self._before[here, source]


def _sequence(counts: Sequence[int]) -> np.ndarray:  # sum of the counts
    """Each source as often as its count, spread so that every prefix has its share."""
    total, done, found = sum(counts), [0] * len(counts), []
    sources = range(len(counts))
    for place in range(total):
        # The next of a source may come once its share exceeds what it had, and must before its
        # share is one more.
        open_ = [
            i for i in sources if done[i] < counts[i] and done[i] * total < (place + 1) * counts[i]
        ]
        chosen = min(open_, key=lambda i: (-((done[i] + 1) * total // -counts[i]), i))
        done[chosen] += 1
        found.append(chosen)
    return np.array(found)


def _whole(weights: Sequence[float | int], names: Sequence[str]) -> list[int]:
    """The weights as the smallest whole numbers that are to one another as they are."""
    if not len(weights):
        raise DataError("A mixture of no sources was asked for. Give one at least.")
    for name, weight in zip(names, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(
                f"The weight of {name} is {weight}, and a share is above 0. Set weight=1, or leave "
                f"{name} out of the mixture."
            )
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth
    measure = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * measure) for weight in exact]
    whole = [count // math.gcd(*whole) for count in whole]
    if sum(whole) > LONGEST:
        near = [max(1, round(1000 * count / sum(whole))) for count in whole]
        given = ", ".join(f"{name} {weight}" for name, weight in zip(names, weights, strict=True))
        advice = ", ".join(f"{name} {count}" for name, count in zip(names, near, strict=True))
        raise DataError(
            f"The weights {given} are exact only over {sum(whole):,} rows, more than {LONGEST:,}. "
            f"Round them: {advice}."
        )
    return whole
