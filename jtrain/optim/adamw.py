"""Adam with weight decay beside the gradient."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.moments import Moments


@configclass
class AdamW(Moments):
    """Loshchilov & Hutter, https://arxiv.org/abs/1711.05101; the learning rate scales the decay."""

    kind: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of the weights that `decay` names, before the learning rate scales it."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Adam's direction, and the decay beside it."""
        return optax.chain(optax.scale_by_adam(self.b1, self.b2, self.eps), decay)
