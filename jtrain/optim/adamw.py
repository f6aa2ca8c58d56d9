"""AdamW: Adam with decoupled weight decay."""

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
    """Weight decay of the leaves that `decay` names, before the learning rate scales it."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return Adam's direction plus the decay."""
        return optax.chain(optax.scale_by_adam(self.b1, self.b2, self.eps), decay)
