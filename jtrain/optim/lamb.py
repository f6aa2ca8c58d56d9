"""AdamW whose steps are as long, leaf by leaf, as the leaf is."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.moments import Moments
from jtrain.optim.recipe import NO_NAMES, NamedDims
from jtrain.optim.stacked_layers import layerwise


@configclass
class Lamb(Moments):
    """You et al., https://arxiv.org/abs/1904.00962, for batches of thousands of rows.

    The learning rate is the share of its norm that a leaf moves; a leaf of zeros moves as AdamW's.
    """

    kind: Literal["lamb"] = "lamb"
    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of the weights that `decay` names, before a leaf's step is brought to its length."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the root of the mean of squares, so that nothing is divided by zero."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """AdamW's direction, each leaf as long as the parameters of the leaf."""
        return self.layered_rule(decay, NO_NAMES)

    def layered_rule(
        self, decay: optax.GradientTransformation, dims: NamedDims
    ) -> optax.GradientTransformation:
        """The same with a length for each layer of a stack."""
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        return optax.chain(adam, decay, layerwise(optax.scale_by_trust_ratio(), dims))
