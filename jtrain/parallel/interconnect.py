"""Test of the interconnect: one all-reduce over all devices, checked and timed."""

import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_PERIOD = 7  # so that a result that is shifted or cut is wrong


class AllReduce(NamedTuple):
    """Result of an all-reduce over all devices of all processes."""

    devices: int
    num_bytes: int
    """Bytes of the array on each device."""
    seconds: float
    """Median of the repetitions."""
    wrong: tuple[int, ...]
    """Devices of this process whose sum was not exact."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes that each device sends in a ring, a second: 2 (n - 1) / n of its array."""
        return 2 * (self.devices - 1) / self.devices * self.num_bytes / self.seconds


def measure_all_reduce(num_bytes: int, repeats: int = 5) -> AllReduce:
    """Sum an array of float32 over all devices; all processes call it at the same time.

    The values are small whole numbers, so the sum is exact in any order.
    """
    devices = jax.devices()
    count, width = len(devices), num_bytes // 4
    mesh = Mesh(np.array(devices), ("all",))
    pattern = np.arange(width, dtype=np.float32) % _PERIOD + 1

    def shard(index: Any) -> np.ndarray:
        return ((index[0].start or 0) + 1) * pattern[None]

    x = jax.make_array_from_callback((count, width), NamedSharding(mesh, P("all")), shard)
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P())
    )
    result = jax.block_until_ready(total(x))
    expected = count * (count + 1) // 2 * pattern[None]
    wrong = [
        s.device.id
        for s in result.addressable_shards
        if not np.array_equal(np.asarray(s.data), expected)
    ]
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(total(x))
        seconds.append(time.perf_counter() - begun)
    return AllReduce(count, 4 * width, statistics.median(seconds), tuple(wrong))
