"""Fingerprints of leaves: 64 bits each, independent of the disk and of the sharding.

A fingerprint is computed where the leaf is stored, before any copy, so it finds damage that the
digests of files cannot: damage on the way to the disk or back. Each element is one word of 32 bits,
or two, and each word is mixed with its position in the leaf in two ways; both are summed modulo
2**32. Integer sums are the same in any order, so under any sharding. A change of one word is always
detected, a change of several with about one exception in 2**64.

Each device has the sums, computed from its own data: replicas from their own copy, shards from the
devices that they were summed with. So replicas that have diverged, by a flipped bit in the memory
or arithmetic of one device, are detected at no more cost than reading the sums of all devices
(shown by tests/checkpoint).

The mixing is the finalizer of MurmurHash3, Austin Appleby, https://github.com/aappleby/smhasher.
"""

import collections
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Leaf
from jtrain.errors import DeviceError

PendingSums: TypeAlias = list[tuple[tuple[str, ...], Any]]  # names, and their sums (names, 2)

_CHUNK = 1 << 16  # words at a time on the host, to stay in its cache


def start(arrays: Mapping[str, Leaf]) -> PendingSums:
    """Start to compute the sums of each leaf on its devices, without waiting.

    In a run of several processes, each calls this with the same leaves at the same time.
    """
    by_mesh: dict[Hashable, dict[str, jax.Array]] = collections.defaultdict(dict)
    single: PendingSums = []
    for name, leaf in arrays.items():
        if not isinstance(leaf, jax.Array):
            single.append(((name,), np.array([_sums_on_host(np.asarray(leaf))], np.uint32)))
        elif leaf.sharding.memory_kind == "pinned_host":  # no arithmetic there
            on_device = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
            # One program for each leaf, so that they are not on the device all at once.
            single.append(((name,), _sums_of_leaves([on_device])))
        else:
            mesh = getattr(leaf.sharding, "mesh", leaf.sharding)  # one program, one mesh
            by_mesh[mesh][name] = leaf
    groups = [(tuple(group), _sums_of_leaves([*group.values()])) for group in by_mesh.values()]
    return groups + single


def read(pending: PendingSums) -> dict[str, str]:
    """Wait for the fingerprint of each leaf, 16 hexadecimal digits."""
    values = jax.device_get([sums for _, sums in pending])
    named = zip((names for names, _ in pending), values, strict=True)
    return {
        name: format_sums(*pair)
        for names, sums in named
        for name, pair in zip(names, sums, strict=True)
    }


def is_ready(pending: PendingSums) -> bool:
    """Return whether all sums are computed."""
    return all(isinstance(sums, np.ndarray) or sums.is_ready() for _, sums in pending)


def format_sums(high: Any, low: Any) -> str:
    """Format two sums as a fingerprint."""
    return f"{int(high):08x}{int(low):08x}"


@jax.jit
def _sums_of_leaves(leaves: list[jax.Array]) -> jax.Array:
    """Return uint32 (leaves, 2), replicated on each device: one array to wait for and to read."""
    return jnp.stack([jnp.stack(_sums(leaf)) for leaf in leaves])


@jax.jit  # leaves of one shape are traced once
def _sums(leaf: Any) -> tuple[Any, Any]:
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], -1)
    dtype = _byte_dtype(leaf.dtype)
    if dtype != leaf.dtype:  # a cast to its own dtype would truncate without x64
        leaf = leaf.astype(dtype)
    bits = min(32, 8 * leaf.dtype.itemsize)
    words = jax.lax.bitcast_convert_type(leaf, f"uint{bits}").astype(jnp.uint32)
    positions, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):  # no reshape: it would gather shards
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        positions += index * np.uint32(stride % 2**32)
        stride *= words.shape[dim]
    # Both sums in one reduction: for 200 MB on a CPU XLA takes 0.012 s, and 0.2 s for two sums.
    zeros, add = (np.uint32(0), np.uint32(0)), lambda a, b: (a[0] + b[0], a[1] + b[1])
    return jax.lax.reduce(_mix(words, positions), zeros, add, tuple(range(words.ndim)))


def _sums_on_host(leaf: np.ndarray) -> tuple[int, int]:
    leaf = np.ascontiguousarray(leaf.astype(_byte_dtype(leaf.dtype), copy=False)).reshape(-1)
    leaf = leaf.view(np.real(leaf).dtype)
    words = leaf.view(f"<u{min(4, leaf.dtype.itemsize)}")
    sums = [0, 0]
    for first in range(0, words.size, _CHUNK):
        chunk = words[first : first + _CHUNK].astype(np.uint32)
        positions = np.arange(first, first + chunk.size, dtype=np.uint64).astype(np.uint32)
        for i, mixed in enumerate(_mix(chunk, positions)):
            sums[i] += int(np.sum(mixed, dtype=np.uint32))
    return sums[0] % 2**32, sums[1] % 2**32


def _byte_dtype(dtype: Any) -> Any:
    """Return a dtype of whole bytes with the same values: dtypes under 8 bits have no bitcast."""
    if dtype == np.bool_:
        return np.uint8
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.int8
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return np.float32
    return dtype


def _mix(words: Any, positions: Any) -> tuple[Any, Any]:
    """Return two words for each word: at any position, different words give different results."""
    salt = positions * np.uint32(0x9E3779B1)
    x = words ^ salt
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    x = x ^ (x >> np.uint32(16))
    y = (x ^ (salt >> np.uint32(7))) * np.uint32(0x27D4EB2F)
    return x, y ^ (y >> np.uint32(15))


ReplicaPrints: TypeAlias = dict[str, dict[str, list[str]]]  # leaf -> fingerprint -> devices
NAMED = 3  # leaves in an error message


def local_prints(pending: PendingSums) -> ReplicaPrints:
    """Return the fingerprints of each leaf on this process's devices, with the devices of each."""
    replicas = [
        (names, device, sums)
        for names, sums_on_devices in pending
        for device, sums in _replicas(sums_on_devices)
    ]
    values = jax.device_get([sums for *_, sums in replicas])
    found: ReplicaPrints = {}
    for (names, device, _), sums in zip(replicas, values, strict=True):
        for name, pair in zip(names, sums, strict=True):
            found.setdefault(name, {}).setdefault(format_sums(*pair), []).append(device)
    return found


def check_replicas(found: ReplicaPrints, step: int) -> dict[str, str]:
    """Return the fingerprint of each leaf.

    Raises:
        DeviceError: if some devices differ from the others, with their names.
    """
    differing = {name: prints for name, prints in found.items() if len(prints) > 1}
    if differing:
        text = "; ".join(
            _describe(name, prints) for name, prints in list(differing.items())[:NAMED]
        )
        more = f" (and {len(differing) - NAMED} more leaves)" if len(differing) > NAMED else ""
        raise DeviceError(
            f"step {step}: replicas of a leaf differ between devices. {text}{more}. A bit has "
            f"flipped in memory or arithmetic. The step was not saved; earlier checkpoints are "
            f"valid. Run again to resume from the newest, without a device that is named twice."
        )
    return {name: next(iter(prints)) for name, prints in found.items()}


def _describe(leaf: str, prints: Mapping[str, list[str]]) -> str:
    ranked = sorted(prints.items(), key=lambda pair: len(pair[1]))
    total = sum(map(len, prints.values()))
    (fewest, odd), (_, others) = ranked[0], ranked[-1]
    if len(odd) == len(others):
        return f"{leaf}: {_join(odd)} against {_join(others)}"
    return f"{leaf}: {_join(odd)} of {total} devices ({fewest})"


def _join(devices: list[str]) -> str:
    return ", ".join(devices[:4]) + (", ..." if len(devices) > 4 else "")


def _replicas(sums: Any) -> list[tuple[str, Any]]:
    """Return the replicas of these sums, each with the name of its device or host."""
    if not isinstance(sums, jax.Array):
        return [(f"the host of process {jax.process_index()}", sums)]
    name = lambda device: f"{device.platform}:{device.id} of process {device.process_index}"
    return [(name(shard.device), shard.data) for shard in sums.addressable_shards]
