"""Random numbers as functions of (seed, step, row, lane): numpy, the same on every machine.

A lane names a draw: two lanes of a row are independent.
"""

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ATTEMPTS = 64  # an attempt of `beta` fails at most every other time


def random_bits(seed: int, step: int, row: np.ndarray, lane: int) -> np.ndarray:  # uint64, b
    """Return 64 random bits for each row.

    The finalizer of splitmix64 is applied to one word after the other.
    """
    state = np.zeros(1, np.uint64)
    for word in (seed, step, lane):
        state = splitmix(state ^ np.array([word % 2**64], np.uint64))
    return splitmix(splitmix(state ^ row.astype(np.uint64)))


def uniform(seed: int, step: int, row: np.ndarray, lane: int) -> np.ndarray:  # float64, b
    """Return a number in 0 .. 1, without 1, for each row: a multiple of 2**-53."""
    return (random_bits(seed, step, row, lane) >> np.uint64(11)) * 2.0**-53


def integers(
    seed: int, step: int, row: np.ndarray, lane: int, below: int
) -> np.ndarray:  # int64, b
    """Return an integer in 0 .. below-1 for each row; `below` is under 2**48."""
    return (uniform(seed, step, row, lane) * below).astype(np.int64)


def beta(seed: int, step: int, row: np.ndarray, lane: int, alpha: float) -> np.ndarray:  # b
    """Draw from Beta(alpha, alpha) for each row, where alpha is in 0 .. 1, without 0.

    Source: Joehnk 1964; u^(1/alpha) / (u^(1/alpha) + v^(1/alpha)) where the sum is at most 1, in
    logarithms, as the powers of a small alpha are smaller than any float. Draws take the lanes
    from `lane` to `lane + 2 * ATTEMPTS - 1`. Beta(1, 1) is uniform.
    """
    if alpha == 1:
        return uniform(seed, step, row, lane)
    share, pending = np.full(len(row), 0.5), np.arange(len(row))
    for attempt in range(ATTEMPTS):
        if not len(pending):
            break
        # 1 - uniform is in 0 .. 1 without 0, which has no logarithm.
        u, v = (
            np.log(1 - uniform(seed, step, row[pending], lane + 2 * attempt + i)) / alpha
            for i in (0, 1)
        )
        both = np.logaddexp(u, v)
        accepted = both <= 0
        share[pending[accepted]] = np.exp(u - both)[accepted]
        pending = pending[~accepted]
    return share


def splitmix(x: np.ndarray) -> np.ndarray:  # uint64; products of arrays wrap by definition
    """Apply the finalizer of splitmix64 to each number (Steele, Lea and Flood 2014)."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
