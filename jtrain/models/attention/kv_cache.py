"""Attention to what came before, whose keys and values are kept in a cache."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.models.attention.attention import attention_where


class KVCache(NamedTuple):
    """The keys and values of a layer; s is the whole context, of which a first part is filled."""

    k: Float[Array, "b s g k"]
    v: Float[Array, "b s g k"]


def remembering(
    kept: KVCache, at: Int[Array, ""], *, window: int | None = None, soft_cap: float | None = None
) -> Any:
    """`attend(q, k, v)` of new tokens at `at`, `at` + 1, ...: what they see; and the cache.

    A position sees itself and what came before it, at most `window` of them. What stands in the
    cache after the last new token is never seen.
    """

    def attend(q, k, v):
        put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, at, axis=1)
        after = KVCache(put(kept.k, k), put(kept.v, v))
        now = at + jnp.arange(q.shape[1], dtype=at.dtype)
        back = now[:, None] - jnp.arange(kept.k.shape[1], dtype=at.dtype)[None]  # t s
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        scale = 1 / math.sqrt(q.shape[-1])
        return attention_where(q, *after, seen, scale=scale, soft_cap=soft_cap), after

    return attend
