"""One piece of each kind, as another package has them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array

import jtrain as jt
from jtrain.config.sections import GuardPolicy
from jtrain.data import Arrays
from jtrain.optim import OptimizerConfig, ScheduleBase
from jtrain.optim.schedules import LearningRate
from jtrain.parallel import BaseParallelConfig, Device
from jtrain.parallel.strategies.single import OneDevice
from jtrain.train.trackers import TrackedRun, TrackerConfig, TrackerRun


@jt.configclass
class Signed(OptimizerConfig):
    """Steps by the sign of the gradient."""

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the sign, with the decay added."""
        return optax.chain(optax.scale_by_sign(), decay)


@jt.configclass
class Halved(ScheduleBase):
    """Half of the peak from the middle of the run on."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step."""
        return lambda step: peak * (1 - 0.5 * (step >= steps // 2))


@jt.configclass
class LastDevice(BaseParallelConfig):
    """The last device of those that there are."""

    def build(self, among: Sequence[Device] | None = None) -> OneDevice:
        """Build the strategy of one device."""
        return OneDevice(list(among or jax.local_devices())[-1])


@jt.configclass
class Lines(TrackerConfig):
    """Lines of JSON beside the run."""

    def open(self, about: TrackedRun) -> TrackerRun:
        """Append to the file of the run."""
        file = (about.directory / "lines.jsonl").open("a")
        write = lambda step, numbers: print(json.dumps({"step": step, **numbers}), file=file)
        return TrackerRun("lines", write, lambda end: file.close())


class _Limit:
    def __init__(self, most: float, steps: int):
        self._most, self.steps = most, steps

    def judge(self, numbers: Any, was_skipped: bool) -> jt.Stop | None:
        self.steps += 1
        return jt.Stop("the loss is too high", "failed") if numbers.loss > self._most else None

    def state(self) -> dict[str, int]:
        return {"steps": self.steps}


@jt.configclass
class Limit(GuardPolicy):
    """Stop where the loss is above a limit."""

    most: float = 1e3
    """The limit."""

    def make_judge(self, known: Mapping[str, Any]) -> _Limit:
        """Return the judge, which counts the steps of all lives of the run."""
        return _Limit(self.most, known.get("steps", 0))


@jt.configclass
class Line(jt.Kind):
    """Points of a line."""

    rows: int = 64
    """Number of points."""

    def build(self) -> Arrays:
        """Return the points."""
        x = np.linspace(-1, 1, self.rows, dtype=np.float32)
        return Arrays(x=x, y=3 * x + 1)


@jt.configclass
class Slope(jt.Kind):
    """A slope and an intercept."""

    def build(self) -> tuple[dict[str, float], Any]:
        """Return the first parameters, and the prediction."""

        def predict(params: Mapping[str, Array], x: Array) -> Array:
            return params["slope"] * x + params["at"]

        return {"slope": 0.0, "at": 0.0}, predict
