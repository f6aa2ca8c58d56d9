"""Attention of each position to itself and what came before."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.trees import at_least_f32


def causal(
    q: Float[Array, "b t h k"], k: Float[Array, "b t h k"], v: Float[Array, "b t h k"]
) -> Float[Array, "b t h k"]:
    """softmax(q k / sqrt(head size)) v over the positions up to each one's own.

    The softmax is taken in at least float32. Heads are a leading dim inside, where they are a
    batch of plain matrix products.
    """
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q, k, v))  # b h t k
    scores = at_least_f32(jnp.einsum("bhtk,bhsk->bhts", q, k)) * (1 / math.sqrt(q.shape[-1]))
    # Added, not selected: for a select XLA:CPU writes out a score-sized array of the same constant.
    time = scores.shape[-1]
    future = jnp.where(jnp.tri(time, dtype=bool), 0, -1e30).astype(scores.dtype)
    chances = jax.nn.softmax(scores + future[None, None], axis=-1).astype(v.dtype)
    return jnp.moveaxis(jnp.einsum("bhts,bhsk->bhtk", chances, v), 1, 2)
