"""A computed permutation of any number of rows; nothing is stored."""

import numpy as np

from jtrain.data.batches.counter_rng import GOLDEN, splitmix

ROUNDS = 12  # 8 are enough for 60 rows, and 12 for 4: tests/data/test_shuffle.py counts the orders


def permute(places: np.ndarray, rows: int, *, seed: int, epoch: int | np.ndarray) -> np.ndarray:
    """Return the row (int64) at each of `places` (int64, any shape, in 0 .. rows-1) in an epoch.

    For a given seed and epoch, a permutation of `range(rows)`. The epoch is a single number, or an
    array with the epoch of each place. Only integers of a fixed width are computed, so the order is
    the same on any machine and with any numpy: tests/data/test_shuffle.py pins the order, which
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
