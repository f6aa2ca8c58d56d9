"""The second moment of a matrix from the means of its rows and columns."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.optim.recipe import Recipe
from jtrain.values import values


@values
class Adafactor(Recipe):
    """Shazeer & Stern, https://arxiv.org/abs/1804.04235: an optimizer state of rows + columns.

    The share of the second moment that is kept at step t (from 0) is 1 - (t + 1)^-memory. Momentum
    and decay are scaled by the learning rate, as everywhere here, which optax's alias does not do.
    """

    kind: Literal["adafactor"] = "adafactor"
    memory: float = Field(default=0.8, gt=0, le=1)
    """How soon the second moment remembers long: the exponent above."""
    factor_from: int = Field(default=128, ge=2)
    """Leaves of whose dims two are at least so large are factored; others keep a whole moment."""
    threshold: float = Field(default=1.0, ge=1)
    """Largest root mean square of a leaf's direction."""
    relative: bool = True
    """Whether the learning rate is a share of the leaf's root mean square (at least 1e-3)."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Share of the mean direction that is kept each step; 0 keeps no state."""
    eps: float = Field(default=1e-30, gt=0)
    """Added to the squares of the gradient."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """The gradient over its factored root mean square, then the decay."""
        stages: list[optax.GradientTransformation] = [
            optax.scale_by_factored_rms(
                decay_rate=self.memory,
                min_dim_size_to_factor=self.factor_from,
                epsilon=self.eps,
            ),
            optax.clip_by_block_rms(self.threshold),
        ]
        if self.relative:
            stages.append(optax.scale_by_param_block_rms())
        if self.momentum:
            stages.append(optax.ema(self.momentum, debias=False))
        return optax.chain(*stages, decay)
