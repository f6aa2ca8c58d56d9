"""Running means of the loss and the gradient norm, to detect spikes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class RunningMean:
    """Means over roughly the last `memory` steps: weights decay by `1 - 1/memory` a step.

    Only finite numbers are included. The weights add up to 1 from the first step on.
    """

    memory: int
    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0

    def absorb(self, loss: float, grad_norm: float) -> None:
        """Update the means by a step; a step that is not finite changes nothing."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.steps += 1
            share = max(1 / self.steps, 1 / self.memory)
            self.loss += share * (loss - self.loss)
            self.grad_norm += share * (grad_norm - self.grad_norm)

    def above(self, name: str, value: float, factor: float) -> bool:
        """Return whether a loss or norm is more than `factor` times its mean; 0 is no bound.

        With a mean below zero: whether it exceeds the mean by `factor - 1` times its size.
        """
        mean = getattr(self, name)
        known = factor > 0 and self.steps >= self.memory
        return known and value - mean > (factor - 1) * abs(mean)

    def state(self) -> dict[str, Any]:
        """Return JSON from which `restore` recovers the same means, to the bit."""
        state = dataclasses.asdict(self)
        del state["memory"]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the means to a saved state; an empty one restarts them."""
        self.steps = state.get("steps", 0)
        self.loss, self.grad_norm = state.get("loss", 0.0), state.get("grad_norm", 0.0)
