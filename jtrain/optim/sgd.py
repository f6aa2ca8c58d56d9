"""SGD, with momentum and Nesterov's momentum, and Lion: steps by the sign of a mean gradient."""

from typing import Literal

import optax
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.optim.recipe import OptimizerConfig


@configclass
class SGD(OptimizerConfig):
    """Gradient descent; weight decay is added to the gradient before the momentum.

    Source: Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html.
    """

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Decay rate of the last direction; 0: no momentum and no state."""
    nesterov: bool = False
    """Use Nesterov's momentum, which looks a step ahead."""

    @model_validator(mode="after")
    def _check_nesterov(self) -> "SGD":
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov looks ahead along the momentum, which is 0: set optimizer.momentum=0.9 "
                "or optimizer.nesterov=false"
            )
        return self

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Add the decay to the gradient, then the momentum."""
        if not self.momentum:
            return decay
        return optax.chain(decay, optax.trace(self.momentum, self.nesterov))


@configclass
class Lion(OptimizerConfig):
    """Chen et al., https://arxiv.org/abs/2302.06675.

    The authors advise a learning rate 3 to 10 times below AdamW's, and a decay as many times above.
    """

    kind: Literal["lion"] = "lion"
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of the leaves that `decay` names, before the learning rate scales it."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the running mean in the signed direction; the rest is the gradient."""
    b2: float = Field(default=0.99, ge=0, lt=1)
    """Decay rate of the running mean of gradients."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the sign plus the decay."""
        return optax.chain(optax.scale_by_lion(self.b1, self.b2), decay)
