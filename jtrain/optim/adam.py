"""Adam."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.optim.recipe import Recipe
from jtrain.values import values


@values
class Adam(Recipe):
    """Kingma & Ba, https://arxiv.org/abs/1412.6980; weight decay is part of the gradient.

    Decay is then divided by the root of the second moment like everything else: `adamw` is the one
    in which it is not.
    """

    kind: Literal["adam"] = "adam"
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the running mean of gradients that is kept each step."""
    b2: float = Field(default=0.999, ge=0, lt=1)
    """Share of the running mean of their squares that is kept each step."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of that mean, so that nothing is divided by zero."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """The mean gradient over the root of the mean square, both without their bias."""
        return optax.chain(decay, optax.scale_by_adam(self.b1, self.b2, self.eps))
