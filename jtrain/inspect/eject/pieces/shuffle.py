"""The order of rows, in which jtrain trains."""

import numpy as np

SEED: int = 0  # of the parameters, of the order of the rows and of dropout
BATCH: int = 128  # rows a step

# Every row once an epoch, each epoch in another order: a Feistel network over the bits of a place,
# so that the batch of a step follows from its number, and nothing is shuffled or stored.
# Black and Rogaway 2002, Ciphers with arbitrary finite domains.

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shuffled(step, count):
    """Return the rows (of `count`) of a step."""
    epochs, places = np.divmod(step * BATCH + np.arange(BATCH), count)
    start = splitmix(splitmix(np.array([SEED], np.uint64)) ^ epochs.astype(np.uint64))
    numbers = np.arange(1, 13, dtype=np.uint64)[:, None]  # of the rounds
    keys = list(splitmix(start + numbers * GOLDEN).astype(np.uint32))
    bits = (count - 1).bit_length()
    found = feistel(places, bits, keys)
    while (beyond := found >= count).any():  # walk on until the place is a row
        found[beyond] = feistel(found[beyond], bits, [key[beyond] for key in keys])
    return found


def splitmix(x):
    """Return the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def feistel(places, bits, keys):
    """Permute the numbers of so many bits; the two halves change one another in turn."""
    half = bits // 2
    low_mask, high_mask = np.uint32((1 << half) - 1), np.uint32((1 << (bits - half)) - 1)
    low, high = (places & int(low_mask)).astype(np.uint32), (places >> half).astype(np.uint32)
    for number, key in enumerate(keys):
        if number % 2:
            low ^= lowbias32(high ^ key) & low_mask
        else:
            high ^= lowbias32(low ^ key) & high_mask
    return (high.astype(np.int64) << half) | low


def lowbias32(x):
    """Return an integer hash: https://nullprogram.com/blog/2018/07/31/."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def places():
    """Return the arrays that every batch has.

    `row` is the place in the batch, by which a row draws; where `mask` is false a row is padding.
    """
    return {"row": np.arange(BATCH, dtype=np.int32), "mask": np.ones(BATCH, bool)}
