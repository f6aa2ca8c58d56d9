"""Running means of the loss and of the gradient norm, and what lies far above them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class RunningMean:
    """The means over the last `memory` steps, roughly: each weighs by `1 - 1/memory` a step less.

    Only finite numbers get in. The weights add up to 1 from the first step on.
    """

    memory: int
    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0

    def absorb(self, loss: float, grad_norm: float) -> None:
        """Takes in a step that was taken; does nothing with one that is not finite."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.steps += 1
            share = max(1 / self.steps, 1 / self.memory)
            self.loss += share * (loss - self.loss)
            self.grad_norm += share * (grad_norm - self.grad_norm)

    def above(self, name: str, value: float, factor: float) -> bool:
        """Whether a loss or norm is more than `factor` times its mean; 0 is no bound.

        Of a mean below zero: further above it than `factor - 1` times its size.
        """
        mean = getattr(self, name)
        known = factor > 0 and self.steps >= self.memory
        return known and value - mean > (factor - 1) * abs(mean)

    def state(self) -> dict[str, Any]:
        """JSON of which `restore` makes the same, to the bit."""
        found = dataclasses.asdict(self)
        del found["memory"]
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what was kept; nothing of it begins anew."""
        self.steps = state.get("steps", 0)
        self.loss, self.grad_norm = state.get("loss", 0.0), state.get("grad_norm", 0.0)
