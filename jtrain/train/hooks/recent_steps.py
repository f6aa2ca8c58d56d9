"""Keeps a few numbers of the last steps where they lie, until somebody asks for them."""

import collections
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics


class StepMetrics(NamedTuple):
    """What a step came to."""

    step: int
    loss: float
    grad_norm: float
    skipped: int
    """Steps that were skipped so far, this one included."""
    scale: float = math.nan
    """The loss scale of the step; NaN where there is none."""


_NAMES = ("loss", "grad_norm", "skipped", "loss_scale")


class RecentSteps(Hook):
    """The steps since somebody last asked; nothing is read of a device before.

    Args:
        every: steps in a call.
    """

    def __init__(self, *, every: int = 1):
        self.every = every
        self._calls: collections.deque[tuple[int, Metrics]] = collections.deque()

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Keeps them."""
        self._calls.append((step, {name: metrics[name] for name in _NAMES if name in metrics}))

    def forget(self, step: int) -> None:
        """Steps up to this one are asked for no more."""
        while self._calls and self._calls[0][0] <= step:
            self._calls.popleft()

    def upto(self, step: int) -> list[StepMetrics]:
        """The steps that are kept, of calls that ended by this step."""
        found = []
        for last, metrics in self._calls:
            if last > step:
                break
            told = jax.device_get(metrics)
            there = [told[name].value() for name in _NAMES if name in told]
            values = [np.atleast_1d(each).tolist() for each in there]
            for place, (loss, norm, skipped, *scale) in enumerate(zip(*values, strict=True)):
                number = last - len(values[0]) + 1 + place
                found.append(StepMetrics(number, loss, norm, round(skipped), *scale))
        return found
