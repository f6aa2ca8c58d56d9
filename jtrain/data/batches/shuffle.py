"""A permutation of any number of rows that is computed, never stored."""

import numpy as np

from jtrain.data.batches.counter_rng import GOLDEN, splitmix

ROUNDS = 12  # 8 are enough for 60 rows, and 12 for 4: tests/data/test_shuffle.py counts the orders


def shuffled(places: np.ndarray, rows: int, *, seed: int, epoch: int | np.ndarray) -> np.ndarray:
    """The row (int64) at each of `places` (int64, any shape, in 0 .. rows-1) in an epoch's order.

    For a given seed and epoch, a permutation of `range(rows)`. The epoch is one of all places, or
    an array of one for each. Only whole numbers of a fixed width are computed, so the order is the
    same on any machine and with any numpy: it is pinned by tests/data/test_shuffle.py and will not
    change.

    A Feistel network over the bits of the place, halves as equal as can be, its round function the
    integer hash `lowbias32`; a result beyond the rows is put through again until it lies among them
    ("cycle walking", fewer than 2 passes on average). Source: Black and Rogaway 2002, Ciphers with
    arbitrary finite domains; https://nullprogram.com/blog/2018/07/31/ for the hash.
    """
    if not places.size:
        return places.astype(np.int64)
    epochs = np.asarray(epoch)
    first, last = int(epochs.min()), int(epochs.max())
    which = None if first == last else epochs - first
    if last - first <= places.size:
        keys = _keys(seed, np.arange(first, last + 1))
    else:  # far from one another
        epochs, of = np.unique(epochs, return_inverse=True)
        keys, which = _keys(seed, epochs), of.reshape(places.shape)
    bits = (rows - 1).bit_length()
    result = _network(places, bits, keys, which)
    while (beyond := result >= rows).any():
        again = None if which is None else which[beyond]
        result[beyond] = _network(result[beyond], bits, keys, again)
    return result


def _network(
    places: np.ndarray, bits: int, keys: np.ndarray, which: np.ndarray | None
) -> np.ndarray:
    """A permutation of the numbers of so many bits, by the keys (ROUNDS n) `which` has for each."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint32((1 << low_bits) - 1), np.uint32((1 << (bits - low_bits)) - 1)
    low = (places & int(low_mask)).astype(np.uint32)
    high = (places >> low_bits).astype(np.uint32)
    for turn, key in enumerate(keys):
        key = key if which is None else key.take(which)  # of one epoch, or one for each place
        if turn % 2:
            low ^= _hash(high, key) & low_mask
        else:
            high ^= _hash(low, key) & high_mask
    return (high.astype(np.int64) << low_bits) | low


def _hash(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    """lowbias32 of `x ^ key`; unsigned products wrap by definition."""
    x = x ^ key
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _keys(seed: int, epochs: np.ndarray) -> np.ndarray:  # uint32, ROUNDS n
    """A 32-bit key for each round and epoch: splitmix64, started from the seed and the epoch."""
    begun = splitmix(np.array([seed % 2**64], np.uint64))
    states = splitmix(begun ^ epochs.astype(np.uint64))
    turns = np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None]
    return splitmix(states + turns * GOLDEN).astype(np.uint32)
