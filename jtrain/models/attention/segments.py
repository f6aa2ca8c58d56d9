"""Several sequences in one row, each a segment, which is to the model as if it were alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def places_within(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """The place of each position within its segment, from 0; a segment is a run of one number."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    begins = jnp.where(segments != before, index, 0)
    return index - jax.lax.cummax(begins, axis=1)
