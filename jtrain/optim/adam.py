"""Adam."""

from typing import Literal

import optax

from jtrain.config.configclass import configclass
from jtrain.optim.moments import Moments


@configclass
class Adam(Moments):
    """Kingma & Ba, https://arxiv.org/abs/1412.6980; weight decay is part of the gradient.

    Decay is then divided by the root of the second moment like everything else: `adamw` is the one
    in which it is not.
    """

    kind: Literal["adam"] = "adam"

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """The mean gradient over the root of the mean square, both without their bias."""
        return optax.chain(decay, optax.scale_by_adam(self.b1, self.b2, self.eps))
