"""Ulysses: every device exchanges its part of the time of all heads for all time of some heads.

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
    """`attention` of what one device has, in a `shard_map` over `axis`; kernels too.

    The devices have the positions in their own order, and must divide `g`. `segments` are those of
    all devices.
    """
    of_heads = lambda x: jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
    of_time = lambda x: jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)
    return of_time(attention(of_heads(q), of_heads(k), of_heads(v), segments, platform=platform))


def refuse_few_groups(groups: int, devices: int, tensor: int) -> None:
    """Checks that each device can have whole groups of heads.

    Raises:
        ShardingError: with the numbers of devices that divide them.
    """
    here = groups // tensor
    if here % devices == 0:
        return
    fits = ", ".join(str(n) for n in range(1, devices) if here % n == 0)
    over = f" over parallel.tensor={tensor}" if tensor > 1 else ""
    raise ShardingError(
        f"{groups} kv_heads{over} do not divide into parallel.context={devices}, of which each "
        f"has whole ones with context_by=ulysses. Take parallel.context of {fits}, or "
        f"parallel.context_by=ring, which splits no heads."
    )
