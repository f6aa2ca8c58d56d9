"""Linear decay."""

from typing import Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.rate import LearningRate, Warmup, warmed


@configclass
class LinearSchedule(ScheduleBase):
    """A straight line from the peak to its `final` share."""

    kind: Literal["linear"] = "linear"
    warmup: Warmup = 0
    """Steps of linear warmup, or 1 epoch, 2M tokens, 5%; 0 starts at the peak."""
    final: float = Field(default=0.0, ge=0, le=1)
    """The rate of the last step, as a share of the peak."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`."""
        return warmed(lambda x, _: 1 - x, peak, steps, self.warmup, self.final)
