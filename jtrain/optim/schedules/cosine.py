"""Cosine decay."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.rate import LearningRate, Warmup, warmed


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
        return warmed(half_cosine, peak, steps, self.warmup, self.final)


def half_cosine(x: Any, xp: Any) -> Any:
    """Return 1 to 0 as `x` goes from 0 to 1, level at both ends."""
    return (1 + xp.cos(np.pi * x)) / 2
