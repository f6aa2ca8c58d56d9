"""Sampling of tokens from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.pytree import at_least_f32


def draw(
    logits: Float[Array, "b v"],
    keys: Shaped[Array, "b"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
    top_p: float | Float[Array, ""] = 1.0,
) -> Int[Array, "b"]:
    """Draw a token for each row by the row's key.

    Probabilities are the softmax of the logits divided by `temperature`; at 0 the likeliest token
    is taken. Candidates are the `top_k` likeliest tokens, and of these the fewest whose
    probabilities add up to `top_p` or more: at least one.

    Args:
        logits: any floating type; computed in at least float32.
        keys: one for each row.
        temperature: 0 or more.
        top_k: 0 draws from all.
        top_p: above 0; 1 draws from all.

    Source of top_p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751.
    """
    wide = at_least_f32(logits)
    warm = wide / jnp.maximum(temperature, 1e-6).astype(wide.dtype)
    ordered, order = jax.lax.top_k(warm, min(top_k or warm.shape[-1], warm.shape[-1]))
    chances = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(chances, axis=-1) - chances
    rank = jnp.arange(ordered.shape[-1])[None]
    candidates = jnp.where((before < top_p) | (rank == 0), ordered, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, candidates)
    drawn = jnp.where(temperature > 0, drawn, 0)  # the first is the likeliest
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]
