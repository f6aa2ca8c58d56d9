"""A permutation of any number of rows that is computed, never stored."""

import numpy as np

ROUNDS = 12  # 8 are enough for 60 rows, and 12 for 4: tests/data/test_shuffle.py counts the orders
_LOW32, _LOW64 = 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF


def shuffled(places: np.ndarray, rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """The row (int64) at each of `places` (int64, any shape, in 0 .. rows-1) in an epoch's order.

    For a given seed and epoch, a permutation of `range(rows)`. Only whole numbers of a fixed width
    are computed, so the order is the same on any machine and with any numpy: it is pinned by
    tests/data/test_shuffle.py and will not change.

    A Feistel network over the bits of the place, halves as equal as can be, its round function the
    integer hash `lowbias32`; a result beyond the rows is put through again until it lies among them
    ("cycle walking", fewer than 2 passes on average). Source: Black and Rogaway 2002, Ciphers with
    arbitrary finite domains; https://nullprogram.com/blog/2018/07/31/ for the hash.
    """
    keys = _keys(seed, epoch)
    bits = (rows - 1).bit_length()
    result = _network(places, bits, keys)
    while (beyond := result >= rows).any():
        result[beyond] = _network(result[beyond], bits, keys)
    return result


def _network(places: np.ndarray, bits: int, keys: list[int]) -> np.ndarray:
    """A permutation of the numbers of so many bits."""
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    low = (places & low_mask).astype(np.uint32)
    high = (places >> low_bits).astype(np.uint32)
    for turn, key in enumerate(keys):
        if turn % 2:
            low ^= _hash(high, key) & np.uint32(low_mask)
        else:
            high ^= _hash(low, key) & np.uint32(high_mask)
    return (high.astype(np.int64) << low_bits) | low


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """lowbias32 of `x ^ key`; unsigned products wrap by definition."""
    x = x ^ np.uint32(key)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _keys(seed: int, epoch: int) -> list[int]:
    """A 32-bit key for each round: splitmix64, started from the seed and the epoch."""
    state = _mixed(_mixed(seed & _LOW64) ^ (epoch & _LOW64))
    return [
        _mixed((state + turn * 0x9E3779B97F4A7C15) & _LOW64) & _LOW32
        for turn in range(1, ROUNDS + 1)
    ]


def _mixed(x: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _LOW64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LOW64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LOW64
    return x ^ (x >> 31)
