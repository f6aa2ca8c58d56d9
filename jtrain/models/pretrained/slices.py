"""Slices of parameters over mapped files: copied, and put on devices one at a time."""

import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jtrain.core.types import Leaf as Array

CHUNK = 1 << 23
"""Bytes that are copied before the pages of the file are let go."""

Index: TypeAlias = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class ParameterView:
    """A parameter as a view of mapped tensors, where its transform moves no bytes."""

    array: np.ndarray
    tensors: Sequence[np.ndarray]
    """The published tensors that the parameter is made from."""

    def copy(self, index: Index, out: np.ndarray) -> None:
        """Copy a slice to `out`, cast to its dtype; let go of the pages of the files."""
        part, out = np.atleast_1d(self.array[index]), np.atleast_1d(out)
        # Along the dim with the largest step, so that each page is read in few chunks.
        dim = int(np.argmax(part.strides))
        rows = max(1, CHUNK * part.shape[dim] // max(part.nbytes, 1))
        for first in range(0, part.shape[dim], rows):
            chunk = (*(slice(None),) * dim, slice(first, first + rows))
            out[chunk] = part[chunk]
            self.let_go()

    def let_go(self) -> None:
        """Tell the system that the pages of mapped files are not needed: they are on the disk."""
        _let_go(self.tensors)


def _let_go(tensors: Sequence[np.ndarray]) -> None:
    for tensor in tensors:
        base: Any = tensor
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
            base.madvise(mmap.MADV_DONTNEED)


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two mapped matrices have the same numbers, read until the first difference."""
    if a.shape != b.shape:
        return False
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    rows = max(1, CHUNK * len(a) // max(a.nbytes, b.nbytes, 1))
    for first in range(0, len(a), rows):
        one, other = (x[first : first + rows].astype(np.float32) for x in (a, b))
        if not np.array_equal(one, other, equal_nan=True):
            return False
        _let_go((a, b))
    return True


def put_slices(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Index], np.ndarray]
) -> Array:
    """Make an array of slices, of which one is on the host at a time; replicas are read once."""
    devices: dict[str, list[Any]] = {}
    indices = sharding.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        devices.setdefault(str(index), []).append(device)
    arrays = []
    for same in devices.values():
        index = indices[same[0]]
        assert index is not None, "the device is addressable"
        host = read(index)
        for device in same:
            single = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            arrays.append(jax.device_put(host, single))
        jax.block_until_ready(arrays[-len(same) :])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def release_host_memory() -> None:
    """Return memory that was freed to the system.

    JAX drops its references to host arrays at the next transfer. glibc keeps what is freed between
    arrays that live: 220 MB after a model of 1.3 GB.
    """
    jax.device_put(np.zeros((), np.int8), jax.local_devices()[0])
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)
