"""One-cycle schedule."""

import math
from typing import Any, Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.cosine import half_cosine
from jtrain.optim.schedules.rate import LearningRate, check_run, rate_of


@configclass
class OneCycle(ScheduleBase):
    """Half a cosine up to the peak, and half a cosine down to nearly 0.

    Source: Smith & Topin, https://arxiv.org/abs/1708.07120. The momentum does not change.
    """

    kind: Literal["one_cycle"] = "one_cycle"
    rise: float = Field(default=0.3, gt=0, lt=1)
    """Share of the steps in which the rate rises."""
    first: float = Field(default=0.04, gt=0, le=1)
    """The rate of the first step, as a share of the peak."""
    final: float = Field(default=4e-6, ge=0, le=1)
    """The rate of the last step, as a share of the peak."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`.

        Raises:
            ConfigError: if no step is left to rise or to fall.
        """
        check_run(steps)
        last = steps - 1
        top = round(self.rise * last)
        if not 0 < top < last:
            least = math.ceil(0.5 / min(self.rise, 1 - self.rise)) + 2
            raise ConfigError(
                f"one cycle rises for {self.rise:g} of {steps} steps and has no step left to "
                f"{'rise' if top == 0 else 'fall'}: raise steps (steps={least}) or take "
                f"optimizer.schedule.kind=cosine."
            )

        def share(step: Any, xp: Any) -> Any:
            up = self.first + (1 - self.first) * half_cosine(1 - step / top, xp)
            over = xp.clip((step - top) / (last - top), 0, 1)
            down = self.final + (1 - self.final) * half_cosine(over, xp)
            return xp.where(step < top, up, down)

        return rate_of(share, peak)
