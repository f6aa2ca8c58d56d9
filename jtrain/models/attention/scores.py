"""Rules of attention scores: soft caps, and segments that do not see one another."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.core.pytree import at_least_f32


def soft_cap(x: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return cap x tanh(x / cap), in at least float32; `x` itself without a cap.

    Source: Gemma team 2024, https://arxiv.org/abs/2408.00118.
    """
    if cap is None:
        return x
    return (cap * jnp.tanh(at_least_f32(x) / cap)).astype(x.dtype)


def places_within(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Return each position's index in its segment, from 0; a segment is a run of one number."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    starts = jnp.where(segments != before, index, 0)
    return index - jax.lax.cummax(starts, axis=1)
