"""Segments: several sequences packed in one row that do not see one another."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def places_within(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Return each position's index in its segment, from 0; a segment is a run of one number."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    starts = jnp.where(segments != before, index, 0)
    return index - jax.lax.cummax(starts, axis=1)
