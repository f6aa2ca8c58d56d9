"""Steps of one size for all, in the direction of a mean gradient's sign."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.recipe import OptimizerConfig


@configclass
class Lion(OptimizerConfig):
    """Chen et al., https://arxiv.org/abs/2302.06675.

    They advise a learning rate 3 to 10 times below AdamW's, and a decay as many times above.
    """

    kind: Literal["lion"] = "lion"
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of the weights that `decay` names, before the learning rate scales it."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the running mean in the direction whose sign is taken; the rest is the gradient."""
    b2: float = Field(default=0.99, ge=0, lt=1)
    """Share of the running mean of gradients that is kept each step."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """The sign, and the decay beside it."""
        return optax.chain(optax.scale_by_lion(self.b1, self.b2), decay)
