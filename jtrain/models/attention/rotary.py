"""Positions of a transformer: their configs, and the rotation of queries and keys; no flax."""

import math
from typing import Annotated, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.pytree import at_least_f32
from jtrain.errors import ConfigError


@configclass
class LearnedPositions:
    """A vector for each position of the context, added to the token's."""

    kind: Literal["learned"] = "learned"


@configclass
class NoPositions:
    """No encoding: only the causal mask depends on the order."""

    kind: Literal["none"] = "none"


@configclass
class NoScaling:
    """Unchanged angles."""

    kind: Literal["none"] = "none"


@configclass
class LinearScaling:
    """Every angle divided by a factor: a context `factor` times as long as the one trained on.

    Source: Chen et al. 2023, https://arxiv.org/abs/2306.15595.
    """

    kind: Literal["linear"] = "linear"
    factor: float = Field(gt=0)
    """Divisor of the angles."""


@configclass
class Llama3Scaling:
    """Slow angles divided by a factor, fast angles unchanged, and those between blended.

    Source: Llama 3.1, `apply_scaling` in
    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py.
    """

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(default=8.0, gt=0)
    """Divisor of the slowest angles."""
    low: float = Field(default=1.0, gt=0)
    """Turns in `context` tokens below which an angle is divided by the full factor."""
    high: float = Field(default=4.0, gt=0)
    """Turns in `context` tokens above which an angle is unchanged."""
    context: int = Field(default=8192, gt=0)
    """Context of the first training, in tokens."""

    @model_validator(mode="after")
    def _low_below_high(self) -> "Llama3Scaling":
        if self.low >= self.high:
            raise ConfigError(
                f"llama3 scaling blends from low={self.low} to high={self.high} turns, and low "
                f"must be below high. Llama 3.1 has low=1.0 and high=4.0."
            )
        return self


Scaling: TypeAlias = Annotated[
    NoScaling | LinearScaling | Llama3Scaling, Field(discriminator="kind")
]


@configclass
class Rotary:
    """Queries and keys rotated by angles that grow with the position.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """

    kind: Literal["rotary"] = "rotary"
    base: float = Field(default=10000.0, gt=1)
    """Reciprocal of the slowest pair's angle a token, about; the fastest pair's angle is 1."""
    scaling: Scaling = NoScaling()
    """Scaling of the angles for a longer context."""
    local_base: float | None = Field(default=None, gt=1)
    """Base in layers with a window, whose angles are then not scaled (Gemma 3); null: `base`."""


Positions: TypeAlias = Annotated[
    LearnedPositions | Rotary | NoPositions, Field(discriminator="kind")
]


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


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.context * plain / (2 * math.pi)
    share = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return share * plain + (1 - share) * plain / scaling.factor


def rotary_angles(values: Rotary, head_size: int, positions: Int[Array, "*b t"]) -> RotaryAngles:
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
