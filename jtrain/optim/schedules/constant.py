"""The same rate all through a run."""

from typing import Literal

from pydantic import Field

from jtrain.optim.schedules.rate import LearningRate, warmed
from jtrain.values import values


@values
class Constant:
    """The peak, to the end."""

    kind: Literal["constant"] = "constant"
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warmup; 0 starts at the peak."""

    def build(self, peak: float, steps: int) -> LearningRate:
        """The rate at each step of a run of `steps`."""
        return warmed(lambda x, xp: xp.ones_like(x), peak, steps, self.warmup, final=1.0)
