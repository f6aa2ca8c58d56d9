"""Batches whose memory nothing else can write, as a device reads it after the call that got it.

On a CPU a program takes the memory of a numpy array itself, where it begins at a multiple of 64
bytes, and other arrays of more than 100 KB are copied by another thread (jax 0.10 to 0.12). So a
reader that fills one buffer again would change a batch under the step that computes with it.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

Read: TypeAlias = Callable[[int], Mapping[str, Any]]
References: TypeAlias = tuple[int, int, int]  # to a batch, an array of it, and the array's memory
ALIGNMENT = 64  # bytes: XLA:CPU takes memory that begins at a multiple without a copy


def read_exclusive(read: Read, step: int) -> dict[str, Any]:
    """Return the batch `read(step)`, with a copy of each array that something else could write.

    An array is copied unless it is read-only, or the batch has the only reference to it and to its
    memory. A reader that makes new arrays for each batch costs no copy.
    """
    batch, references = _count_references(read, step)
    for name, counts in references.items():
        if counts not in _EXCLUSIVE and not _is_constant(batch[name]):
            batch = {**batch, name: aligned_copy(batch[name])}
    return dict(batch)


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


def _count_references(read: Read, step: int) -> tuple[Mapping[str, Any], dict[str, References]]:
    """Return a batch, and the references to its numpy arrays; those of this frame count too."""
    batch = read(step)
    held, references = sys.getrefcount(batch), {}
    for name in batch:
        array = batch[name]
        if isinstance(array, np.ndarray):
            base = array.base  # the array that has the memory, if `array` is a view
            bases = 0 if base is None else sys.getrefcount(base)
            owns = base.flags.owndata if isinstance(base, np.ndarray) else array.flags.owndata
            counts = held, sys.getrefcount(array), bases
            references[name] = counts if owns and type(batch) is dict else (0, 0, 0)
    return batch, references


def _is_constant(array: np.ndarray) -> bool:
    """Return whether numpy refuses to write to the memory of an array."""
    memory: Any = array
    while isinstance(memory, np.ndarray):
        if memory.flags.writeable:
            return False
        memory = memory.base
    return True


# The references to a new array and to a view of one: each version of Python counts in its own way.
_NEW: tuple[Read, ...] = (lambda step: {"x": np.empty(2)}, lambda step: {"x": np.empty(2)[1:]})
_EXCLUSIVE = [_count_references(read, 0)[1]["x"] for read in _NEW]
