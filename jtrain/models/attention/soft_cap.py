"""Soft caps: a smooth bound on the size of numbers."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.pytree import at_least_f32


def soft_cap(x: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return cap x tanh(x / cap), in at least float32; `x` itself without a cap.

    Source: Gemma team 2024, https://arxiv.org/abs/2408.00118.
    """
    if cap is None:
        return x
    return (cap * jnp.tanh(at_least_f32(x) / cap)).astype(x.dtype)
