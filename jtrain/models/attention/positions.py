"""Configs of the positions of a transformer; importing them imports no flax."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
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
