"""Predictions of a classifier: the class of a row and the probability of each class."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def classes(logits: Float[Array, "b c"]) -> dict[str, Array]:
    """Return the likeliest class of each row, and the probability of each class.

    `label` is int32 b, `chances` float32 b c, which add up to 1.
    """
    chances = jax.nn.softmax(logits.astype(jnp.float32))
    return {"label": jnp.argmax(chances, 1).astype(jnp.int32), "chances": chances}
