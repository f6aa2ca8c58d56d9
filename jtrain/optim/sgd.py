"""Gradient descent, with momentum and Nesterov's look ahead."""

from typing import Literal

import optax
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.optim.recipe import OptimizerConfig


@configclass
class SGD(OptimizerConfig):
    """Gradient descent; weight decay is part of the gradient, as momentum sees it.

    Source: Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html.
    """

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Share of the last direction that is kept; 0 keeps no state."""
    nesterov: bool = False
    """Whether to look a step ahead along the momentum."""

    @model_validator(mode="after")
    def _look_ahead(self) -> "SGD":
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov looks ahead along the momentum, which is 0: set optimizer.momentum=0.9 "
                "or optimizer.nesterov=false"
            )
        return self

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """The decayed gradient, and what is left of those before it."""
        if not self.momentum:
            return decay
        return optax.chain(decay, optax.trace(self.momentum, self.nesterov))
