"""AdamW that looks a step ahead along its momentum."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.moments import Moments


@configclass
class NAdamW(Moments):
    """Dozat, https://openreview.net/pdf?id=OM0jvwB8jIp57ZJjtNEZ, with AdamW's decay.

    As optax and PyTorch do, the second moment is without the factor b2 of the paper's algorithm 2.
    """

    kind: Literal["nadamw"] = "nadamw"
    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of the weights that `decay` names, before the learning rate scales it."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Adam's direction with Nesterov's look ahead, and the decay beside it."""
        ahead = optax.scale_by_adam(self.b1, self.b2, self.eps, nesterov=True)
        return optax.chain(ahead, decay)
