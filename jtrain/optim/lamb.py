"""LAMB: AdamW with steps as long as the norm of each leaf."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.adam import Moments
from jtrain.optim.recipe import NO_NAMES, NamedDims
from jtrain.optim.stacked_layers import layerwise


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
