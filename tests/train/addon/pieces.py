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
    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_sign(), decay)


@jt.configclass
class Halved(ScheduleBase):
    def rate(self, peak: float, steps: int) -> LearningRate:
        return lambda step: peak * (1 - 0.5 * (step >= steps // 2))


@jt.configclass
class LastDevice(BaseParallelConfig):
    def build(self, among: Sequence[Device] | None = None) -> OneDevice:
        return OneDevice(list(among or jax.local_devices())[-1])


@jt.configclass
class Lines(TrackerConfig):
    def open(self, about: TrackedRun) -> TrackerRun:
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
    most: float = 1e3

    def make_judge(self, known: Mapping[str, Any]) -> _Limit:
        return _Limit(self.most, known.get("steps", 0))


@jt.configclass
class Line(jt.Kind):
    rows: int = 64

    def build(self) -> Arrays:
        x = np.linspace(-1, 1, self.rows, dtype=np.float32)
        return Arrays(x=x, y=3 * x + 1)


@jt.configclass
class Slope(jt.Kind):
    def build(self) -> tuple[dict[str, float], Any]:

        def predict(params: Mapping[str, Array], x: Array) -> Array:
            return params["slope"] * x + params["at"]

        return {"slope": 0.0, "at": 0.0}, predict
