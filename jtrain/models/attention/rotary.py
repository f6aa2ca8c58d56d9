"""Rotary positions: pairs of numbers rotated by angles that grow with the position."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jtrain.core.pytree import at_least_f32
from jtrain.models.attention.positions import LinearScaling, Llama3Scaling, Rotary


class RotaryAngles(NamedTuple):
    """Cosine and sine of each position's angles, float32, shared by all rows or for each."""

    cos: Float[Array, "*b t r"]
    sin: Float[Array, "*b t r"]


def frequencies(values: Rotary, head_size: int) -> np.ndarray:  # k/2
    """Return the radians a token of each pair, float64, the fastest first."""
    plain = values.base ** (-np.arange(0, head_size, 2) / head_size)
    if isinstance(values.scaling, LinearScaling):
        return plain / values.scaling.factor
    if isinstance(values.scaling, Llama3Scaling):
        return _llama3(plain, values.scaling)
    return plain


def local_rotary(values: Rotary) -> tuple[Rotary, ...]:
    """Return the positions of layers with a window, where `local_base` sets them apart."""
    if values.local_base is None:
        return ()
    return (Rotary(base=values.local_base),)


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.context * plain / (2 * math.pi)
    share = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return share * plain + (1 - share) * plain / scaling.factor


def turn_at(values: Rotary, head_size: int, positions: Int[Array, "*b t"]) -> RotaryAngles:
    """Return the angles at these positions, the same for every layer."""
    radians = jnp.asarray(frequencies(values, head_size), jnp.float32)
    angles = jnp.multiply.outer(positions.astype(jnp.float32), radians)
    return RotaryAngles(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "b t h k"], angles: RotaryAngles) -> Float[Array, "b t h k"]:
    """Rotate numbers i and i + k/2 of each head as a pair, in at least float32.

    The order is that of GPT-NeoX and of Hugging Face's weights; the first Llama release pairs
    neighbours, which is the same up to the order of a head's numbers.
    """
    cos, sin = (part[None, :, None] if part.ndim == 2 else part[:, :, None] for part in angles)
    first, second = jnp.split(at_least_f32(x), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
