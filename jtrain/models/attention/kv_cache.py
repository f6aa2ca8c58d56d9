"""Attention to earlier tokens, whose keys and values are in a cache."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.models.attention.attention import attention_where


class KVCache(NamedTuple):
    """The keys and values of a layer; s is the context, filled from the start."""

    k: Float[Array, "b s g k"]
    v: Float[Array, "b s g k"]


def remembering(
    cache: KVCache,
    at: Int[Array, ""],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Any:
    """Return `attend(q, k, v)` for new tokens at `at`, `at` + 1, ...; it also returns the cache.

    A position sees itself and the positions before it, at most `window` in all. Entries of the
    cache after the last new token are never seen.
    """

    def attend(q, k, v):
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=1)
        new_cache = KVCache(put(cache.k, k), put(cache.v, v))
        positions = at + jnp.arange(q.shape[1], dtype=at.dtype)
        back = positions[:, None] - jnp.arange(cache.k.shape[1], dtype=at.dtype)[None]  # t s
        mask = back >= 0 if window is None else (back >= 0) & (back < window)
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        return attention_where(q, *new_cache, mask, scale=factor, soft_cap=soft_cap), new_cache

    return attend
