"""Adam, with weight decay as part of the gradient."""

from typing import Literal

import optax

from jtrain.config.configclass import configclass
from jtrain.optim.moments import Moments


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
