"""The range test: train a few steps with a growing learning rate, and suggest one.

Source: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3,
https://arxiv.org/abs/1506.01186: the rate grows until the loss diverges; a good rate lies between
the one at which the loss begins to fall and the one at which it stops falling.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jtrain.config.sections import SkipPolicy
from jtrain.config.top import CheckpointConfig, EvaluateConfig, LogConfig
from jtrain.core.loop import Hook, Stop
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.errors import ConfigError
from jtrain.inspect.debug.rehearsals import temporary_directory
from jtrain.io.log import RunLog
from jtrain.optim.schedules import Exponential
from jtrain.train.charts import text_chart
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.signals import Signals
from jtrain.train.processes import join_run
from jtrain.train.run import run, start_run
from jtrain.train.run_store import MemoryStore
from jtrain.train.runtime import enable_compilation_cache
from jtrain.train.trainer import train_to_end

LOW, HIGH, STEPS = 1e-6, 1.0, 100
MIN_STEPS = 20  # with fewer the smoothed loss says nothing
SMOOTHING = 0.05  # share of the steps that the loss is averaged over
DIVERGED = 4.0  # times the lowest smoothed loss
BEGIN_SHARE = 0.1  # of the fall: where it begins
MIN_FALL = 0.02  # share of the loss: less is no fall
WARMUP = 0.1  # share of the steps in which the loss may grow
WIDEN = 1000  # factor by which advice lowers or raises a bound of the rates


Rates: TypeAlias = tuple[float, float]  # the lowest and the highest learning rate of a test


def parse_rates(text: str) -> Rates:
    """Read `1e-6:1`.

    Raises:
        ConfigError: if it is no range of rates.
    """
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low = high = math.nan
    if not (0 < low < math.inf and 0 < high < math.inf):
        raise ConfigError(
            f"--rates {text} is not a range of learning rates; write --rates {LOW:g}:{HIGH:g}"
        )
    if low >= high:
        raise ConfigError(
            f"--rates {text} does not grow; write --rates {high:g}:{max(low, 10 * high):g}"
        )
    return low, high


@dataclasses.dataclass(frozen=True)
class RangeResult:
    """Loss by learning rate, and what it suggests."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool
    """Whether the test ended because the loss was not finite or 4 times its lowest."""
    lower: float | None = None
    """Rate at which the loss begins to fall: Smith's base rate. None where it never falls."""
    steepest: float | None = None
    """Rate at which the loss falls fastest, by the logarithm of the rate: the suggestion."""
    upper: float | None = None
    """Rate at which the smoothed loss is lowest: Smith's largest rate."""
    trouble: str = ""
    """Why there is no suggestion, or why it may be too low."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values; a loss that is not finite is None."""
        finite = lambda values: [x if math.isfinite(x) else None for x in values]
        return {
            **dataclasses.asdict(self),
            "losses": finite(self.losses),
            "smoothed": finite(self.smoothed),
        }


def run_range_test(
    config: RunConfig, rates: Rates = (LOW, HIGH), steps: int = STEPS
) -> RangeResult:
    """Train a config for some steps with a growing rate, under its layout; nothing stays.

    Every process of the run calls this.

    Raises:
        ConfigError: if the optimizer has no rate to grow, or there are too few steps.
    """
    kind = getattr(config.optimizer, "kind", "")
    if kind == "lbfgs":
        raise ConfigError(
            "optimizer.kind=lbfgs searches for the length of each step itself, so that there is no "
            "rate to test. Take another optimizer: optimizer.kind=adamw."
        )
    if steps < MIN_STEPS:
        raise ConfigError(f"--steps {steps} are too few to tell; write --steps {MIN_STEPS} or more")
    enable_compilation_cache()
    HEARTBEAT.phase("start")
    test = _with_growing_rate(config, rates, steps)
    rate = test.optimizer.learning_rate(steps)
    hook = _Losses(steps)
    with open(os.devnull, "w") as nowhere:
        if getattr(test.parallel, "kind", "") == "server":  # its processes read a run's directory
            with temporary_directory(test.name, "range") as directory:
                run(test, hooks=[hook], screen=nowhere, directory=directory / "run")
        else:
            join_run(test, None)
            store = MemoryStore()
            with RunLog(nowhere, keep_lines=False) as log, Signals() as signals:
                program, started, hooks = start_run(test, store, [hook])
                train_to_end(program, started, store, signals, log, hooks)
    applied = [float(rate(step)) for step in range(len(hook.losses))]
    return analyze(applied, hook.losses, diverged=hook.diverged)


def analyze(rates: Sequence[float], losses: Sequence[float], *, diverged: bool) -> RangeResult:
    """Return what the losses at growing rates suggest.

    The loss of a step is that before the step's update: it tells of the rates before it.
    """
    mean = _RunningMean(len(losses))
    smoothed = [mean.add(loss) for loss in losses]
    make = functools.partial(
        RangeResult, tuple(rates), tuple(losses), tuple(smoothed), diverged=diverged
    )
    finite = [i for i, loss in enumerate(smoothed) if math.isfinite(loss)]
    low, high = (rates[0], rates[-1]) if rates else (LOW, HIGH)
    lower_rates = f"--rates {low / WIDEN:g}:{low:g}"
    if len(finite) < 3:  # too few for a slope
        return make(trouble=f"the loss diverged at once. Begin lower: {lower_rates}")
    lowest = min(finite, key=lambda i: smoothed[i])
    first, best = smoothed[finite[0]], smoothed[lowest]
    if first - best < MIN_FALL * max(abs(first), abs(best), 1e-12):
        if diverged:
            return make(trouble=f"the loss only grew. Begin lower: {lower_rates}")
        return make(
            trouble=f"the loss fell by less than {MIN_FALL:.0%}. Go higher: --rates "
            f"{low:g}:{WIDEN * high:g}; if that does not help, check the model by --overfit 1"
        )
    begin = next(i for i in finite if first - smoothed[i] >= BEGIN_SHARE * (first - best))
    steepest = _steepest(rates, smoothed, finite[0], lowest)
    trouble = ""
    if lowest == finite[-1] and not diverged:
        trouble = (
            f"the loss still falls at the highest rate: a higher one may be better. Go higher: "
            f"--rates {low:g}:{WIDEN * high:g}"
        )
    return make(lower=rates[begin], steepest=rates[steepest], upper=rates[lowest], trouble=trouble)


def _steepest(rates: Sequence[float], smoothed: Sequence[float], first: int, last: int) -> int:
    """Return where the smoothed loss falls fastest by the logarithm of the rate."""
    if last - first < 2:
        return last
    logs = np.log(np.asarray(rates[first : last + 1]))
    slopes = np.gradient(np.asarray(smoothed[first : last + 1]), logs)
    return first + int(np.argmin(slopes))


class _RunningMean:
    def __init__(self, count: int):
        self._decay = 1 - 1 / max(1.0, SMOOTHING * count)
        self._total = self._weight = 0.0

    def add(self, value: float) -> float:
        self._total = self._decay * self._total + value
        self._weight = self._decay * self._weight + 1
        return self._total / self._weight


class _Losses(Hook):
    """Hook that records the loss of each step, and ends the run when it diverges."""

    def __init__(self, steps: int):
        self.losses: list[float] = []
        self.diverged = False
        self._steps, self._mean, self._best = steps, _RunningMean(steps), math.inf
        self._skipped = 0

    def on_numbers(self, step: int, numbers: Mapping[str, Any]) -> Stop | None:
        if self.diverged:  # a step that was in flight
            return None
        loss, skipped = float(numbers["loss"]), int(numbers["skipped"])
        if skipped > self._skipped and math.isfinite(loss) and step < self._steps:
            self._skipped = skipped  # an overflow in float16, at which the rate does not grow
            return None
        self.losses.append(loss)
        mean = self._mean.add(loss)
        self._best = min(self._best, mean) if math.isfinite(mean) else self._best
        grown = mean - self._best > (DIVERGED - 1) * max(abs(self._best), 1e-12)
        if not math.isfinite(mean) or (grown and step > WARMUP * self._steps):
            self.diverged = True
            return Stop("the loss diverged")
        return Stop("the range is done") if step == self._steps else None


def _with_growing_rate(config: RunConfig, rates: Rates, steps: int) -> RunConfig:
    """Return the config with a rate that grows by a constant factor a step, and nothing beside."""
    schedule = Exponential(first=rates[0] / rates[1], final=1.0)
    return dataclasses.replace(
        config,
        steps=steps,
        steps_per_call=1,
        optimizer=dataclasses.replace(config.optimizer, lr=rates[1], schedule=schedule),
        evaluate=EvaluateConfig(
            batch=config.evaluate.batch, rows_interact=config.evaluate.rows_interact
        ),
        checkpoint=CheckpointConfig(every=0),
        log=LogConfig(every=steps),
        guard=SkipPolicy(window=steps, without=config.guard.without),
        trackers=(),
    )


def format_result(found: RangeResult, name: str, *, width: int = 80) -> str:
    """Return the plot of the smoothed loss, and the suggestion with its rule and source."""
    points = {"smoothed loss over the learning rate": _visible(found.rates, found.smoothed)}
    plot = text_chart(points, width=width, height=16, label=lambda log: f"{10**log:.1e}")
    steps = len(found.losses)
    end = "the loss diverged" if found.diverged else "the loss did not diverge"
    last = f"{found.rates[-1]:.2g}" if found.rates else "-"
    lines = [plot, f"{steps} steps, the rate up to {last}: {end}"]
    if found.steepest is not None:
        lines += [
            f"suggestion: optimizer.lr={found.steepest:.1e}, at which the smoothed loss falls "
            f"fastest by the logarithm of the rate",
            f"bounds: from {found.lower:.1e} (the loss begins to fall) to {found.upper:.1e} (it is "
            f"lowest), as in Smith 2017, arXiv 1506.01186",
            f"try it: jtrain run {name} optimizer.lr={found.steepest:.1e}",
        ]
    lines += [f"note: {found.trouble}"] if found.trouble else []
    return "\n".join(lines)


def _visible(rates: Sequence[float], losses: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points, clipped a little above the first: a divergence would flatten the rest."""
    points = [(math.log10(x), y) for x, y in zip(rates, losses, strict=True) if math.isfinite(y)]
    if not points:
        return []
    first, least = points[0][1], min(y for _, y in points)
    top = first + (first - least) + 0.1 * abs(first)
    return [(x, min(y, top)) for x, y in points]
