"""NAdamW: AdamW with Nesterov's momentum."""

from typing import Literal

import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.moments import Moments


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
