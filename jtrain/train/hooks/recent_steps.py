"""Recent steps: a few numbers of the last steps, kept on the devices until they are read."""

import collections
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics


class StepMetrics(NamedTuple):
    """Numbers of a step."""

    step: int
    loss: float
    grad_norm: float
    skipped: int
    """Steps that were skipped so far, with this one."""
    scale: float = math.nan
    """Loss scale of the step; NaN without loss scaling."""


_NAMES = ("loss", "grad_norm", "skipped", "loss_scale")


class RecentSteps(Hook):
    """Hook that keeps the steps since the last `forget`; only `read` fetches from a device.

    Args:
        every: steps of a compiled call (`steps_per_call`).
    """

    def __init__(self, *, every: int = 1):
        self.every = every
        self._calls: collections.deque[tuple[int, Metrics]] = collections.deque()

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Keep the numbers of a call."""
        self._calls.append((step, {name: metrics[name] for name in _NAMES if name in metrics}))

    def forget(self, step: int) -> None:
        """Drop the steps up to this one."""
        while self._calls and self._calls[0][0] <= step:
            self._calls.popleft()

    def read(self, step: int) -> list[StepMetrics]:
        """Return the kept steps of calls that ended by this step."""
        steps = []
        for last, metrics in self._calls:
            if last > step:
                break
            fetched = jax.device_get(metrics)
            means = [fetched[name].value() for name in _NAMES if name in fetched]
            columns = [np.atleast_1d(each).tolist() for each in means]
            first = last - len(columns[0]) + 1
            for number, (loss, norm, skipped, *scale) in enumerate(
                zip(*columns, strict=True), first
            ):
                steps.append(StepMetrics(number, loss, norm, round(skipped), *scale))
        return steps
