"""Batches in memory of their own, as a device reads it after the call that got it.

On a CPU a program takes the memory of a numpy array itself, where it begins at a multiple of 64
bytes, and other arrays of more than 100 KB are copied by another thread (jax 0.10 to 0.12). So a
reader that fills one buffer again would change a batch under the step that computes with it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes: XLA:CPU takes memory that begins at a multiple without a copy
LARGE = 1 << 20  # bytes: in 100 KB, alignment costs 7 us and the copy 4 us


def copy_writable(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with a copy of each numpy array that is not read-only."""

    def own(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or _is_constant(x):
            return x
        return aligned_copy(x) if x.nbytes >= LARGE else x.copy()

    return {name: own(x) for name, x in batch.items()}


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Return a copy whose memory begins at a multiple of `ALIGNMENT`."""
    copy = _align(np.empty, array.shape, array.dtype)
    copy[...] = array
    return copy


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros whose memory begins at a multiple of `ALIGNMENT`.

    Large memory costs nothing where it is neither read nor written.
    """
    return _align(np.zeros, shape, dtype)


def _align(
    make: Callable[[int, type], np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = make(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _is_constant(array: np.ndarray) -> bool:
    """Return whether numpy refuses to write to the memory of an array."""
    memory: Any = array
    while isinstance(memory, np.ndarray):
        if memory.flags.writeable:
            return False
        memory = memory.base
    return True
