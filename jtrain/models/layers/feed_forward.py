"""Activations of a transformer's MLP."""

from typing import Literal, TypeAlias

import jax
from jaxtyping import Array, Float

from jtrain.core.pytree import at_least_f32
from jtrain.models.layers.gelu import gelu

Activation: TypeAlias = Literal["gelu", "gelu_exact", "swiglu"]


def bend(
    activation: Activation, wide: Float[Array, "*b f"], gate: Float[Array, "*b f"] | None
) -> Float[Array, "*b f"]:
    """Return GELU of `wide`, by tanh or exact, or SwiGLU: `wide` times SiLU of `gate`.

    The computation is in at least float32.

    Sources: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415; Shazeer 2020,
    https://arxiv.org/abs/2002.05202.
    """
    if activation == "gelu":
        return gelu(wide)
    if activation == "gelu_exact":
        return jax.nn.gelu(at_least_f32(wide), approximate=False).astype(wide.dtype)
    assert gate is not None, "SwiGLU has a gate"
    return (jax.nn.silu(at_least_f32(gate)) * at_least_f32(wide)).astype(wide.dtype)
