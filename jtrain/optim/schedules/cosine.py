"""Cosine schedules: one decay, several with restarts, and one cycle."""

import math
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError
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
class Cosine(ScheduleBase):
    """Half a cosine from the peak to its `final` share.

    Source: Loshchilov & Hutter, https://arxiv.org/abs/1608.03983, without restarts.
    """

    kind: Literal["cosine"] = "cosine"
    warmup: Warmup = 0
    """Steps of linear warmup, or 1 epoch, 2M tokens, 5%; 0 starts at the peak."""
    final: float = Field(default=0.1, ge=0, le=1)
    """The rate of the last step, as a share of the peak."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`."""
        return make_rate(half_cosine, peak, steps, self.warmup, self.final)


def half_cosine(x: Any, xp: Any) -> Any:
    """Return 1 to 0 as `x` goes from 0 to 1, level at both ends."""
    return (1 + xp.cos(np.pi * x)) / 2


@configclass
class Restarts(ScheduleBase):
    """Half a cosine from the peak to its `final` share, `cycles` times over the run.

    Source: Loshchilov & Hutter, https://arxiv.org/abs/1608.03983.
    """

    kind: Literal["restarts"] = "restarts"
    warmup: Warmup = 0
    """Steps of linear warmup, or 1 epoch, 2M tokens, 5%; 0 starts at the peak."""
    cycles: int = Field(gt=1)
    """Number of cycles."""
    growth: float = Field(default=1.0, gt=0)
    """The length of a cycle over that of the one before it; 2 doubles it each time."""
    final: float = Field(default=0.0, ge=0, le=1)
    """The rate of the last step of each cycle, as a share of the peak."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`.

        Raises:
            ConfigError: if the warmup leaves no step, or a cycle has fewer than two steps.
        """
        check_warmup(self.warmup, steps)
        starts = self._starts(steps)

        def share(step: Any, xp: Any) -> Any:
            cycle = sum((step >= start) * 1 for start in starts[1:-1])
            first, after = (xp.asarray(x, xp.float32)[cycle] for x in (starts[:-1], starts[1:]))
            over = xp.clip((step - first) / (after - 1 - first), 0, 1)
            level = self.final + (1 - self.final) * half_cosine(over, xp)
            return warmup_share(step, self.warmup, xp) * level

        return scale_share(share, peak)

    def _starts(self, steps: int) -> list[int]:
        """Return the first step of each cycle, and the number of steps."""
        lengths = self.growth ** np.arange(self.cycles)
        ends = np.array(list(accumulate(lengths))) / lengths.sum()
        span = steps - self.warmup
        starts = [self.warmup, *(self.warmup + round(span * float(end)) for end in ends)]
        shortest = min(b - a for a, b in pairwise(starts))
        if shortest < 2:
            least = self.warmup + int(np.ceil(3 * lengths.sum() / lengths.min()))
            raise ConfigError(
                f"{self.cycles} cycles in the {span} steps after the warmup leave one with "
                f"{shortest}, and each needs two: lower optimizer.schedule.cycles, or raise steps "
                f"(steps={least})."
            )
        return starts


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

        return scale_share(share, peak)
