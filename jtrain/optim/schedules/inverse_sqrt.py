"""Inverse-square-root decay."""

from typing import Any, Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.rate import LearningRate, Warmup, check_warmup, rate_of, rise


@configclass
class InverseSquareRoot(ScheduleBase):
    """The peak over the root of 1 + (steps after the warmup) / `timescale`.

    The curve does not depend on the number of steps, unless the warmup is a share of them, so a run
    can be prolonged from any checkpoint.
    The default timescale is that of Vaswani et al., https://arxiv.org/abs/1706.03762; a timescale
    of its own that of Zhai et al., https://arxiv.org/abs/2106.04560.
    """

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup: Warmup = 0
    """Steps of linear warmup, or 1 epoch, 2M tokens, 5%; 0 starts at the peak."""
    timescale: int = Field(default=0, ge=0)
    """Steps after the warmup at which the rate is 0.71 of the peak; 0 takes warmup + 1."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step, however long the run."""
        check_warmup(self.warmup, steps)
        timescale = self.timescale or self.warmup + 1

        def share(step: Any, xp: Any) -> Any:
            after = xp.maximum(step - self.warmup, 0)
            return rise(step, self.warmup, xp) / xp.sqrt(1 + after / timescale)

        return rate_of(share, peak)
