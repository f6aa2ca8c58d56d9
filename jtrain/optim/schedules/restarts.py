"""Cosine decay with restarts."""

from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.cosine import half_cosine
from jtrain.optim.schedules.rate import LearningRate, Warmup, check_warmup, rate_of, rise


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
            return rise(step, self.warmup, xp) * level

        return rate_of(share, peak)

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
