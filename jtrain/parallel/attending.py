"""Attention over a mesh: each device computes that of its rows and heads."""

from collections.abc import Mapping

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jtrain.parallel.rules import refuse_uneven, split_named
from jtrain.types import Attention

Q, KV = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)


def attend_over(
    mesh: Mesh,
    rules: Mapping[str, tuple[str, ...]],
    attention: Attention,
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    segments: Int[Array, "b s"] | None = None,
) -> Float[Array, "b t h k"]:
    """`attention(q, k, v, segments)`; where it is a kernel, called on each device for its part.

    The compiler splits all else by itself.

    Raises:
        ShardingError: if heads do not divide into whole ones.
    """
    platform = mesh.devices.flat[0].platform
    if not attention.kernel or mesh.size == 1:
        return attention(q, k, v, segments, platform=platform)
    sizes = dict(mesh.shape)
    parts = []
    for x, dims in ((q, Q), (k, KV), (v, KV), (segments, ("batch", None))):
        if x is not None:
            refuse_uneven(x.shape, dims, rules, sizes)
            parts.append(split_named(x.shape, dims, rules, sizes).spec)
    return jax.shard_map(
        lambda *own: attention(*own, platform=platform),
        mesh=mesh,
        in_specs=tuple(parts),
        out_specs=parts[0],
        check_vma=False,  # a kernel does not say over what its result varies
    )(*[x for x in (q, k, v, segments) if x is not None])
