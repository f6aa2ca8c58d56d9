"""Adam and its variants: AdamW with decoupled weight decay, NAdamW with Nesterov's momentum."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.recipe import OptimizerConfig


@configclass
class Moments(OptimizerConfig):
    """The decay rates of both means, and the epsilon of their quotient."""

    b1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the running mean of gradients."""
    b2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the running mean of squared gradients; 0.95 is usual for text."""
    eps: float = Field(default=1e-8, gt=0)
    """Number added to the root of the mean square, so that nothing is divided by zero."""


@configclass
class Adam(Moments):
    """Kingma & Ba, https://arxiv.org/abs/1412.6980; weight decay is part of the gradient.

    So the decay is divided by the root of the second moment like the gradient; `adamw` adds it
    afterwards.
    """

    kind: Literal["adam"] = "adam"

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Divide the mean gradient by the root of the mean square, both bias-corrected."""
        return optax.chain(decay, optax.scale_by_adam(self.b1, self.b2, self.eps))


@configclass
class AdamW(Moments):
    """Loshchilov & Hutter, https://arxiv.org/abs/1711.05101; the learning rate scales the decay."""

    kind: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of the leaves that `decay` names, before the learning rate scales it."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return Adam's direction plus the decay."""
        return optax.chain(optax.scale_by_adam(self.b1, self.b2, self.eps), decay)


@configclass
class NAdamW(Moments):
    """Dozat, https://openreview.net/pdf?id=OM0jvwB8jIp57ZJjtNEZ, with AdamW's decay.

    As in optax and PyTorch, the second moment is without the factor b2 of the paper's algorithm 2.
    """

    kind: Literal["nadamw"] = "nadamw"
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of the leaves that `decay` names, before the learning rate scales it."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return Adam's direction with Nesterov's momentum, plus the decay."""
        nadam = optax.scale_by_adam(self.b1, self.b2, self.eps, nesterov=True)
        return optax.chain(nadam, decay)
