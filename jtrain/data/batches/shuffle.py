"""Orders of rows and random numbers, each a function of a seed: nothing is stored."""

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


ROUNDS = 12  # 8 are enough for 60 rows, and 12 for 4: tests/data/test_by_step.py counts the orders


def permute(places: np.ndarray, rows: int, *, seed: int, epoch: int | np.ndarray) -> np.ndarray:
    """Return the row (int64) at each of `places` (int64, any shape, in 0 .. rows-1) in an epoch.

    For a given seed and epoch, a permutation of `range(rows)`. The epoch is a single number, or an
    array with the epoch of each place. Only integers of a fixed width are computed, so the order is
    the same on any machine and with any numpy: tests/data/test_by_step.py pins the order, which
    will not change.

    The permutation is a Feistel network over the bits of the place, in halves as equal as possible,
    whose round function is the integer hash `lowbias32`. A result beyond the rows goes through the
    network again until it is a row ("cycle walking", fewer than 2 passes on average). Source: Black
    and Rogaway 2002, Ciphers with arbitrary finite domains;
    https://nullprogram.com/blog/2018/07/31/ for the hash.
    """
    if not places.size:
        return places.astype(np.int64)
    epochs = np.asarray(epoch)
    first, last = int(epochs.min()), int(epochs.max())
    key_of = None if first == last else epochs - first
    if last - first <= places.size:
        keys = _keys(seed, np.arange(first, last + 1))
    else:  # the epochs are far from one another
        epochs, inverse = np.unique(epochs, return_inverse=True)
        keys, key_of = _keys(seed, epochs), inverse.reshape(places.shape)
    bits = (rows - 1).bit_length()
    result = _network(places, bits, keys, key_of)
    while (beyond := result >= rows).any():
        keys_beyond = None if key_of is None else key_of[beyond]
        result[beyond] = _network(result[beyond], bits, keys, keys_beyond)
    return result


def _network(
    places: np.ndarray, bits: int, keys: np.ndarray, key_of: np.ndarray | None
) -> np.ndarray:
    """Permute the numbers of `bits` bits by the keys (ROUNDS n); `key_of` picks each one's key."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint32((1 << low_bits) - 1), np.uint32((1 << (bits - low_bits)) - 1)
    low = (places & int(low_mask)).astype(np.uint32)
    high = (places >> low_bits).astype(np.uint32)
    for number, key in enumerate(keys):
        key = key if key_of is None else key.take(key_of)  # one key, or one for each place
        if number % 2:
            low ^= _hash(high, key) & low_mask
        else:
            high ^= _hash(low, key) & high_mask
    return (high.astype(np.int64) << low_bits) | low


def _hash(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return lowbias32 of `x ^ key`; unsigned products wrap by definition."""
    x = x ^ key
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _keys(seed: int, epochs: np.ndarray) -> np.ndarray:  # uint32, ROUNDS n
    """Return a 32-bit key for each round and epoch: splitmix64, seeded by seed and epoch."""
    start = splitmix(np.array([seed % 2**64], np.uint64))
    states = splitmix(start ^ epochs.astype(np.uint64))
    numbers = np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None]
    return splitmix(states + numbers * GOLDEN).astype(np.uint32)
