"""Learning rates as functions of the step, with a warmup."""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jtrain.config.durations import DurationField
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
    """Raise unless a run has a step.

    Raises:
        ConfigError: if `steps` is 0.
    """
    if steps < 1:
        raise ConfigError(
            f"a learning rate needs a run, and steps is {steps}: set steps=1 or more."
        )


def check_warmup(warmup: int, steps: int) -> None:
    """Raise unless a run of `steps` is longer than its warmup.

    Raises:
        ConfigError: with the warmup and the steps to set.
    """
    check_run(steps)
    if warmup >= steps:
        what = "the whole" if warmup == steps else "longer than the"
        raise ConfigError(
            f"warmup {warmup} is {what} run of {steps} steps: lower optimizer.schedule.warmup "
            f"(optimizer.schedule.warmup={steps // 10}) or raise steps (steps={10 * warmup})."
        )
