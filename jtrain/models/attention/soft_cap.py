"""Numbers bent so that none is beyond a cap."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.pytree import at_least_f32


def soft_cap(x: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """cap x tanh(x / cap), in at least float32; `x` itself where there is no cap.

    Source: Gemma team 2024, https://arxiv.org/abs/2408.00118.
    """
    if cap is None:
        return x
    return (cap * jnp.tanh(at_least_f32(x) / cap)).astype(x.dtype)
