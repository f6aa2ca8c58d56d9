"""Constant learning rate."""

from typing import Literal

from jtrain.config.configclass import configclass
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.rate import LearningRate, Warmup, warmed


@configclass
class Constant(ScheduleBase):
    """The peak at every step after the warmup."""

    kind: Literal["constant"] = "constant"
    warmup: Warmup = 0
    """Steps of linear warmup, or 1 epoch, 2M tokens, 5%; 0 starts at the peak."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`."""
        return warmed(lambda x, xp: xp.ones_like(x), peak, steps, self.warmup, final=1.0)
