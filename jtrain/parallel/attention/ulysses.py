"""Ulysses: devices exchange a shard of time with all heads for all of time with some heads.

Source: Jacobs et al. 2023, arXiv 2309.14509.
"""

import jax
from jaxtyping import Array, Float, Int

from jtrain.errors import ShardingError
from jtrain.parallel.attention.protocol import Attention


def ulysses(
    attention: Attention,
    axis: str,
    platform: str,
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g k"],
    segments: Int[Array, "b s"] | None = None,
) -> Float[Array, "b t h k"]:
    """Return `attention` on the shards of a device, in a `shard_map` over `axis`; kernels too.

    Positions are in their original order, and the number of devices must divide `g`. `segments` are
    those of all devices.
    """
    to_heads = lambda x: jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
    to_time = lambda x: jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)
    return to_time(attention(to_heads(q), to_heads(k), to_heads(v), segments, platform=platform))


def check_whole_heads(heads: int, groups: int, devices: int, tensor: int) -> None:
    """Raise unless each device can have complete groups of heads.

    Raises:
        ShardingError: with the numbers of devices that divide the groups.
    """
    local = groups // tensor
    if local % devices == 0:
        return
    fits = ", ".join(str(n) for n in range(1, devices) if local % n == 0)
    name = "heads" if groups == heads else "kv_heads"  # a config gives only fewer
    over = f" over parallel.tensor={tensor}" if tensor > 1 else ""
    raise ShardingError(
        f"{groups} {name}{over} do not divide into parallel.context={devices}: with "
        f"context_by=ulysses each device has complete heads. Take parallel.context of {fits}, or "
        f"parallel.context_by=ring, which splits no heads."
    )
