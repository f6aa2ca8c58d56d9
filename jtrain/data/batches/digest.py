"""A 64-bit digest that identifies a batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def digest_batch(batch: Mapping[str, Any]) -> int:
    """Return the XXH3 digest of the names, types, shapes and bytes of a batch's arrays."""
    import xxhash

    hasher = xxhash.xxh3_64()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        hasher.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.intdigest()
