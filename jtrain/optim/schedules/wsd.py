"""Warmup, stable, decay: a plateau with a decay at the end."""

from typing import Any, Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.rate import LearningRate, Warmup, warmed


@configclass
class WarmupStableDecay(ScheduleBase):
    """The peak for most of the run, then a straight line to its `final` share.

    A run can be prolonged from any checkpoint before the decay begins. Source: MiniCPM,
    https://arxiv.org/abs/2404.06395; the straight line, https://arxiv.org/abs/2405.18392.
    """

    kind: Literal["wsd"] = "wsd"
    warmup: Warmup = 0
    """Steps of linear warmup, or 1 epoch, 2M tokens, 5%; 0 starts at the peak."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps after the warmup in which the rate falls."""
    final: float = Field(default=0.0, ge=0, le=1)
    """The rate of the last step, as a share of the peak."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`."""

        def curve(x: Any, xp: Any) -> Any:
            return xp.minimum((1 - x) / self.decay, 1)

        return warmed(curve, peak, steps, self.warmup, self.final)
