"""Attention of each position to all, or to all of its segment."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.models.attention.attention import attention_where


class FullAttention:
    """Attention of each position to all."""

    kernel = False

    def __call__(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b s h k"],
        v: Float[Array, "b s h k"],
        segments: Int[Array, "b s"] | None = None,
        *,
        platform: str | None = None,
    ) -> Float[Array, "b t h k"]:
        """Return softmax(q k / sqrt(head size)) v over all positions of the same segment."""
        del platform
        visible = jnp.ones((q.shape[1], k.shape[1]), bool)
        if segments is not None:
            visible = segments[:, :, None] == segments[:, None]
        return attention_where(q, k, v, visible, scale=1 / math.sqrt(q.shape[-1]))
