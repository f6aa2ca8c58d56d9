"""Adam with weight decay beside the gradient."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.optim.recipe import Recipe
from jtrain.values import values


@values
class AdamW(Recipe):
    """Loshchilov & Hutter, https://arxiv.org/abs/1711.05101; the learning rate scales the decay."""

    kind: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of the weights that `decay` names, before the learning rate scales it."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the running mean of gradients that is kept each step."""
    b2: float = Field(default=0.999, ge=0, lt=1)
    """Share of the running mean of their squares that is kept each step; 0.95 is usual for text."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of that mean, so that nothing is divided by zero."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Adam's direction, and the decay beside it."""
        return optax.chain(optax.scale_by_adam(self.b1, self.b2, self.eps), decay)
