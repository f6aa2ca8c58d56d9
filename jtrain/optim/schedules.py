"""Learning rates over a run: a linear warmup to the peak, then one of four curves.

Steps count from 0. During a warmup of `w` steps the rate is peak x (step + 1) / (w + 1), so that no
step is wasted at a rate of 0, and step `w` is the first at the peak. The last step, `steps - 1`,
has the rate `final` x peak exactly; a run that goes on past its end stays there.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

from jtrain.errors import ConfigError
from jtrain.values import values

# The rate at a step: for an int a float, by numpy, that a log can read; for an array an array.
LearningRate: TypeAlias = Callable[[Any], Any]
Curve: TypeAlias = Callable[[Any, Any], Any]  # (0..1 after the warmup, numpy or jnp) -> 1..0


@values
class Constant:
    """The peak, to the end."""

    kind: Literal["constant"] = "constant"
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warmup; 0 starts at the peak."""

    def build(self, peak: float, steps: int) -> LearningRate:
        """The rate at each step of a run of `steps`."""
        return _warmed(lambda x, xp: xp.ones_like(x), peak, steps, self.warmup, final=1.0)


@values
class Linear:
    """A straight line from the peak to its `final` share."""

    kind: Literal["linear"] = "linear"
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warmup; 0 starts at the peak."""
    final: float = Field(default=0.0, ge=0, le=1)
    """The rate of the last step, as a share of the peak."""

    def build(self, peak: float, steps: int) -> LearningRate:
        """The rate at each step of a run of `steps`."""
        return _warmed(lambda x, _: 1 - x, peak, steps, self.warmup, self.final)


@values
class Cosine:
    """Half a cosine from the peak to its `final` share.

    Source: Loshchilov & Hutter, https://arxiv.org/abs/1608.03983, without restarts.
    """

    kind: Literal["cosine"] = "cosine"
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warmup; 0 starts at the peak."""
    final: float = Field(default=0.1, ge=0, le=1)
    """The rate of the last step, as a share of the peak."""

    def build(self, peak: float, steps: int) -> LearningRate:
        """The rate at each step of a run of `steps`."""

        def curve(x, xp):
            return (1 + xp.cos(np.pi * x)) / 2

        return _warmed(curve, peak, steps, self.warmup, self.final)


@values
class WarmupStableDecay:
    """The peak for most of the run, then a straight line to its `final` share.

    A run can be prolonged from any checkpoint before the decay begins. Source: MiniCPM,
    https://arxiv.org/abs/2404.06395; the straight line, https://arxiv.org/abs/2405.18392.
    """

    kind: Literal["wsd"] = "wsd"
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warmup; 0 starts at the peak."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """The share of the steps after the warmup during which the rate falls."""
    final: float = Field(default=0.0, ge=0, le=1)
    """The rate of the last step, as a share of the peak."""

    def build(self, peak: float, steps: int) -> LearningRate:
        """The rate at each step of a run of `steps`."""

        def curve(x, xp):
            return xp.minimum((1 - x) / self.decay, 1)

        return _warmed(curve, peak, steps, self.warmup, self.final)


Schedule: TypeAlias = Annotated[
    Constant | Linear | Cosine | WarmupStableDecay, Field(discriminator="kind")
]


def _warmed(curve: Curve, peak: float, steps: int, warmup: int, final: float) -> LearningRate:
    """The rate that warms up, then goes from the peak to `final` x peak as `curve` falls to 0."""
    if steps < 1:
        raise ConfigError(
            f"a learning rate needs a run, and steps is {steps}: set steps=1 or more."
        )
    if warmup >= steps:
        what = "the whole" if warmup == steps else "longer than the"
        raise ConfigError(
            f"warmup {warmup} is {what} run of {steps} steps: lower optimizer.schedule.warmup "
            f"(optimizer.schedule.warmup={steps // 10}) or raise steps (steps={10 * warmup})."
        )
    span = max(steps - 1 - warmup, 1)  # the last step alone stays at the peak

    def learning_rate(step: Int[Array, ""] | int) -> Float[Array, ""] | float:
        on_host = isinstance(step, int)
        xp: Any = np if on_host else jnp
        s = xp.asarray(step, xp.float32)
        rise = xp.minimum((s + 1) / (warmup + 1), 1)
        fall = curve(xp.clip((s - warmup) / span, 0, 1), xp)
        rate = peak * rise * (final + (1 - final) * fall)
        return float(rate) if on_host else rate

    return learning_rate
