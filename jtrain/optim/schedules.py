"""Learning-rate schedules: configs with `build(peak, steps)`, one curve a class.

Steps count from 0. During a warmup of `w` steps the rate is peak x (step + 1) / (w + 1), so that no
step is wasted at a rate of 0, and step `w` is the first at the peak. Where a curve has a `final`,
the last step, `steps - 1`, has the rate `final` x peak exactly, and later steps of a resumed run
keep that rate. A schedule is as long as the run, unless it has `steps` of its own.
"""

import abc
import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.config.durations import DurationField, OwnSteps
from jtrain.config.registry import Kind
from jtrain.errors import ConfigError

# Step -> rate: a float by numpy for an int, for logs; an array for an array.
LearningRate: TypeAlias = Callable[[Any], Any]
Warmup = Annotated[int, DurationField(0, "%")]  # steps, once the data is known
Curve: TypeAlias = Callable[[Any, Any], Any]  # (argument, numpy or jnp) -> a share of the peak


def scale_share(share: Curve, peak: float) -> LearningRate:
    """Return `peak` times the share at each step; `share` gets the step as a float32."""

    def learning_rate(step: Int[Array, ""] | int) -> Float[Array, ""] | float:
        on_host = isinstance(step, int)
        xp: Any = np if on_host else jnp
        rate = peak * share(xp.asarray(step, xp.float32), xp)
        return float(rate) if on_host else rate

    return learning_rate


def warmup_share(step: Any, warmup: int, xp: Any) -> Any:
    """Return the share of the peak during a warmup; 1 after it."""
    return xp.minimum((step + 1) / (warmup + 1), 1)


def make_rate(curve: Curve, peak: float, steps: int, warmup: int, final: float) -> LearningRate:
    """Return a rate that warms up, then goes from the peak to `final` x peak as `curve` falls to 0.

    The argument of `curve` is the elapsed share of the steps after the warmup, 0 to 1.

    Raises:
        ConfigError: if the warmup leaves no step.
    """
    check_warmup(warmup, steps)
    span = max(steps - 1 - warmup, 1)  # the last step alone stays at the peak

    def share(step: Any, xp: Any) -> Any:
        fall = curve(xp.clip((step - warmup) / span, 0, 1), xp)
        return warmup_share(step, warmup, xp) * (final + (1 - final) * fall)

    return scale_share(share, peak)


def check_run(steps: int) -> None:
    """Raise unless a run has a step."""
    if steps < 1:
        raise ConfigError(
            f"a learning rate needs a run, and steps is {steps}: set steps=1 or more."
        )


def check_warmup(warmup: int, steps: int) -> None:
    """Raise unless a run of `steps` is longer than its warmup."""
    check_run(steps)
    if warmup >= steps:
        what = "the whole" if warmup == steps else "longer than the"
        raise ConfigError(
            f"warmup {warmup} is {what} run of {steps} steps: lower optimizer.schedule.warmup "
            f"(optimizer.schedule.warmup={steps // 10}) or raise steps (steps={10 * warmup})."
        )


@configclass
class ScheduleBase(Kind, OwnSteps, abc.ABC):
    """A curve of the learning rate, which a subclass defines by `rate`."""

    steps: Annotated[int, DurationField(0, "%")] = 0
    """Length of the schedule in steps, or 3 epochs, or 100% of the run; then the rate stays.
    0: the steps of the run when it started, however long it is trained."""

    def build(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a run of `steps`.

        Raises:
            ConfigError: if the schedule does not fit its length.
        """
        try:
            return self.rate(peak, self.steps or steps)
        except ConfigError as error:
            if not self.steps:
                raise
            # The message of `rate` is about the run's `steps=N`.
            own = str(error).replace("steps=", "optimizer.schedule.steps=")
            raise ConfigError(f"optimizer.schedule.steps {self.steps}: {own}") from None

    @abc.abstractmethod
    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`.

        Raises:
            ConfigError: if the schedule does not fit that length.
        """


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
        """Return the rate at each step of a schedule of `steps`."""
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
        """Return the rate at each step of a schedule of `steps`."""
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
