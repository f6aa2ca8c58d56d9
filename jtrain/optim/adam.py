"""Adam and its variants: AdamW with decoupled weight decay, NAdamW, LAMB."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.groups import layerwise
from jtrain.optim.recipe import NO_NAMES, NamedDims, OptimizerConfig


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


@configclass
class Lamb(Moments):
    """You et al., https://arxiv.org/abs/1904.00962, for batches of thousands of rows.

    The learning rate is the step's share of the leaf's norm; a leaf of zeros takes AdamW's step.
    """

    kind: Literal["lamb"] = "lamb"
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of the leaves that `decay` names, before a leaf's step is scaled."""
    eps: float = Field(default=1e-6, gt=0)
    """Number added to the root of the mean of squares, so that nothing is divided by zero."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return AdamW's direction, each leaf scaled to the norm of its parameters."""
        return self.layered_rule(decay, NO_NAMES)

    def layered_rule(
        self, decay: optax.GradientTransformation, dims: NamedDims
    ) -> optax.GradientTransformation:
        """Return the rule with a norm for each layer of a stack."""
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        return optax.chain(adam, decay, layerwise(optax.scale_by_trust_ratio(), dims))
