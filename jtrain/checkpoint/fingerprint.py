"""A number of 64 bits for each leaf, by which it is known again after the disk and another layout.

It is computed where the leaf lies, before anything is copied, so it finds what the files' digests
cannot: a leaf that was damaged on its way to the disk, or on its way back. Each element is a word
of 32 bits that is mixed with its place in the leaf, and the words are added up modulo 2**32, twice:
sums of integers come out the same in any order, so under any sharding. A change of one element is
always seen, a change of several but for about one case in 2**64.

The mixing is the finalizer of MurmurHash3, Austin Appleby, https://github.com/aappleby/smhasher.
"""

import collections
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Leaf

Begun: TypeAlias = list[tuple[tuple[str, ...], Any]]  # names, and of each two sums: (names, 2)

_CHUNK = 1 << 16  # words at a time on the host, so that they stay in its cache


def begin(arrays: Mapping[str, Leaf]) -> Begun:
    """The sums of each leaf, begun where it lies; nothing is waited for.

    In a run of several processes each calls this with the same leaves at the same time.
    """
    together: dict[Hashable, dict[str, jax.Array]] = collections.defaultdict(dict)
    alone: Begun = []
    for name, leaf in arrays.items():
        if not isinstance(leaf, jax.Array):
            alone.append(((name,), np.array([_on_host(np.asarray(leaf))], np.uint32)))
        elif leaf.sharding.memory_kind == "pinned_host":  # where no arithmetic is done
            here = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
            alone.append(((name,), _on_devices([here])))  # a program each: not all at once there
        else:
            mesh = getattr(leaf.sharding, "mesh", leaf.sharding)  # one program, one mesh
            together[mesh][name] = leaf
    return [(tuple(of), _on_devices([*of.values()])) for of in together.values()] + alone


def read(begun: Begun) -> dict[str, str]:
    """The fingerprint of each leaf, 16 hexadecimal digits, when it is known."""
    every = jax.device_get([sums for _, sums in begun])
    named = zip((names for names, _ in begun), every, strict=True)
    return {
        name: text(*two) for names, sums in named for name, two in zip(names, sums, strict=True)
    }


def ready(begun: Begun) -> bool:
    """Whether all of them are known."""
    return all(isinstance(sums, np.ndarray) or sums.is_ready() for _, sums in begun)


def text(high: Any, low: Any) -> str:
    """Two sums as they are written."""
    return f"{int(high):08x}{int(low):08x}"


@jax.jit
def _on_devices(leaves: list[jax.Array]) -> jax.Array:
    """Uint32 (leaves, 2), of which each device has a copy: one thing to wait for and to read."""
    return jnp.stack([jnp.stack(_on_device(leaf)) for leaf in leaves])


@jax.jit  # and inlined: leaves of one shape are traced once
def _on_device(leaf: Any) -> tuple[Any, Any]:
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], -1)
    if (plain := _plain(leaf.dtype)) != leaf.dtype:  # to its own it would be cut short without x64
        leaf = leaf.astype(plain)
    bits = min(32, 8 * leaf.dtype.itemsize)
    words = jax.lax.bitcast_convert_type(leaf, f"uint{bits}").astype(jnp.uint32)
    places, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):  # no reshape: that would gather what is split
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        places += along * np.uint32(stride % 2**32)
        stride *= words.shape[dim]
    # Both sums in one reduction: on a CPU XLA takes 0.012 s for 200 MB so, and 0.2 s for two sums.
    both = lambda sums, words: (sums[0] + words[0], sums[1] + words[1])
    nothing = np.uint32(0), np.uint32(0)
    return jax.lax.reduce(_mixed(words, places), nothing, both, tuple(range(words.ndim)))


def _on_host(leaf: np.ndarray) -> tuple[int, int]:
    leaf = np.ascontiguousarray(leaf.astype(_plain(leaf.dtype), copy=False)).reshape(-1)
    leaf = leaf.view(np.real(leaf).dtype)
    words = leaf.view(f"<u{min(4, leaf.dtype.itemsize)}")
    sums = [0, 0]
    for first in range(0, words.size, _CHUNK):
        part = words[first : first + _CHUNK].astype(np.uint32)
        places = np.arange(first, first + part.size, dtype=np.uint64).astype(np.uint32)
        for i, mixed in enumerate(_mixed(part, places)):
            sums[i] += int(np.sum(mixed, dtype=np.uint32))
    return sums[0] % 2**32, sums[1] % 2**32


def _plain(dtype: Any) -> Any:
    """A type of whole bytes that holds the same: numbers of less than 8 bits have none."""
    if dtype == np.bool_:
        return np.uint8
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.int8
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return np.float32
    return dtype


def _mixed(words: Any, places: Any) -> tuple[Any, Any]:
    """Two words for each: for any one place, each is another for another word."""
    at = places * np.uint32(0x9E3779B1)
    x = words ^ at
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    x = x ^ (x >> np.uint32(16))
    y = (x ^ (at >> np.uint32(7))) * np.uint32(0x27D4EB2F)
    return x, y ^ (y >> np.uint32(15))
