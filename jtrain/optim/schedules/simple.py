"""Schedules of one curve: constant, linear, exponential, inverse root; a plateau with a decay."""

import math
from typing import Any, Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.rate import (
    LearningRate,
    Warmup,
    check_run,
    check_warmup,
    make_rate,
    scale_share,
    warmup_share,
)


@configclass
class Constant(ScheduleBase):
    """The peak at every step after the warmup."""

    kind: Literal["constant"] = "constant"
    warmup: Warmup = 0
    """Steps of linear warmup, or 1 epoch, 2M tokens, 5%; 0 starts at the peak."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`."""
        return make_rate(lambda x, xp: xp.ones_like(x), peak, steps, self.warmup, final=1.0)


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
        return make_rate(lambda x, _: 1 - x, peak, steps, self.warmup, self.final)


@configclass
class Exponential(ScheduleBase):
    """A constant factor from each step to the next, up or down: from `first` to `final`."""

    kind: Literal["exponential"] = "exponential"
    first: float = Field(default=1.0, gt=0)
    """The rate of the first step, as a share of the peak."""
    final: float = Field(default=0.01, gt=0)
    """The rate of the last step, as a share of the peak."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`."""
        check_run(steps)
        span, growth = max(steps - 1, 1), math.log(self.final / self.first)

        def share(step: Any, xp: Any) -> Any:
            return self.first * xp.exp(growth * xp.clip(step / span, 0, 1))

        return scale_share(share, peak)


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
            return warmup_share(step, self.warmup, xp) / xp.sqrt(1 + after / timescale)

        return scale_share(share, peak)


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

        return make_rate(curve, peak, steps, self.warmup, self.final)
