"""Activations of a transformer's MLP; GELU saves only its input for the backward pass."""

import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.pytree import at_least_f32

SLOPE, CUBE = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the GELU of `x`, approximated by tanh as in GPT-2, computed in at least float32.

    The forward pass takes 1 + tanh(u) = 2 / (1 + exp(-2u)), the backward pass tanh(u) =
    1 - 2 / (1 + exp(2u)): as the two share no expression, the compiler cannot save one for the
    backward pass, and each block writes one array of the MLP's width less. Only reverse mode:
    `jax.jvp` and `jax.hessian` raise.

    Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
    """
    wide = at_least_f32(x)
    return (wide * jax.nn.sigmoid(2 * SLOPE * (wide + CUBE * wide**3))).astype(x.dtype)


def _forward(x):
    return gelu(x), x


def _backward(x, grad):
    wide = at_least_f32(x)
    square = jnp.square(wide)
    # An exponential takes a GPU fewer instructions than a tanh.
    tanh = 1 - 2 / (1 + jnp.exp(2 * SLOPE * wide * (1 + CUBE * square)))
    inner = SLOPE * (1 + 3 * CUBE * square)
    slope = 0.5 * (1 + tanh) + 0.5 * wide * (1 - jnp.square(tanh)) * inner
    return ((at_least_f32(grad) * slope).astype(x.dtype),)


gelu.defvjp(_forward, _backward)


Activation: TypeAlias = Literal["gelu", "gelu_exact", "swiglu", "geglu"]
GATED = ("swiglu", "geglu")  # their MLPs have a third kernel


def bend(
    activation: Activation, wide: Float[Array, "*b f"], gate: Float[Array, "*b f"] | None
) -> Float[Array, "*b f"]:
    """Return GELU of `wide`, by tanh or exact, or `wide` times SiLU or GELU (tanh) of `gate`.

    The computation is in at least float32.

    Sources: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415; Shazeer 2020,
    https://arxiv.org/abs/2002.05202.
    """
    if activation == "gelu":
        return gelu(wide)
    if activation == "gelu_exact":
        return jax.nn.gelu(at_least_f32(wide), approximate=False).astype(wide.dtype)
    assert gate is not None, f"{activation} has a gate"
    if activation == "geglu":
        return gelu(gate) * wide
    return (jax.nn.silu(at_least_f32(gate)) * at_least_f32(wide)).astype(wide.dtype)
