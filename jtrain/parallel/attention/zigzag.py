"""Zigzag order of positions, which gives all devices of a ring equal work in causal attention.

A sequence is cut into 2n chunks, and device i of n has chunks i and 2n-1-i: an early chunk, which
sees little, and a late one, which sees much. Sources: Brandon et al. 2023, arXiv 2311.09431, who
balance by stripes; chunks in pairs as in Llama 3, 2024, arXiv 2407.21783, section 3.3.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jtrain.errors import ShardingError


def zigzag(time: int, devices: int) -> np.ndarray:  # t
    """Return the positions on the devices, one device after the other, int32."""
    chunks = np.arange(time, dtype=np.int32).reshape(2 * devices, -1)
    pairs = [(device, 2 * devices - 1 - device) for device in range(devices)]
    return chunks[np.array(pairs).reshape(-1)].reshape(-1)


def check_even_time(time: int, devices: int, *, chunks: int) -> None:
    """Raise unless the devices can have equal chunks of the positions.

    Raises:
        ShardingError: with the lengths and the numbers of devices that divide.
    """
    unit = chunks * devices
    if time % unit == 0:
        return
    lower, upper = time // unit * unit, -(-time // unit) * unit
    nearest = f"{lower} or {upper}" if lower else f"{upper}"
    fits = [str(n) for n in range(1, devices) if n == 1 or time % (chunks * n) == 0]
    each = "two chunks" if chunks == 2 else "one shard"
    raise ShardingError(
        f"{time} positions do not divide into {unit}: {each} for each of "
        f"parallel.context={devices}. Nearest: sequences of {nearest} (data.context); or "
        f"parallel.context of {', '.join(fits)}."
    )


def chunk_index(device: Int[Array, ""], half: int | Int[Array, ""], devices: int) -> Int[Array, ""]:
    """Return the number of the chunk that is the first (0) or second (1) half on a device."""
    return jnp.where(half == 0, device, 2 * devices - 1 - device)


def restore_order(x: Float[Array, "b t d"], devices: int, axis: str) -> Float[Array, "b t d"]:
    """Return a device's positions in the original order, in a `shard_map`.

    One of its two chunks has an even number and one an odd number; each is sent to the device of
    which it is the first or second half, half of `x` in each of two permutations.
    """
    device = jax.lax.axis_index(axis)
    first, second = jnp.split(x, 2, axis=1)
    even, odd = device % 2 == 0, device % 2 == 1
    last = 2 * devices - 1
    moves = lambda parity: [(i, (i if i % 2 == parity else last - i) // 2) for i in range(devices)]
    firsts = jax.lax.ppermute(jnp.where(even, first, second), axis, moves(0))
    seconds = jax.lax.ppermute(jnp.where(odd, first, second), axis, moves(1))
    return jnp.concatenate([firsts, seconds], axis=1)
