"""Batch normalisation over real rows, with a closed-form backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32

EPSILON = 1e-5
DECAY = 0.9  # of the running statistics a step, as in the published ResNets


class BatchNorm(nnx.Module):
    """`x` with mean 0 and variance 1 in each channel, times `scale`, plus `bias`.

    In training the statistics are those of the batch's rows that the mask shows, which couples the
    rows: the model declares `couples="batch"`. Statistics are computed in at least float32, and the
    running ones, `mean` and `var`, are returned as Means of those rows, by the contract of `extra`.
    Evaluation uses the running statistics and leaves them unchanged; so does training where they
    are `frozen`, and then no row depends on another.

    Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167; the running variance is the
    unbiased one, as there.
    """

    def __init__(
        self,
        channels: int,
        *,
        scale: float = 1.0,
        epsilon: float = EPSILON,
        frozen: bool = False,
    ):
        self.use_running_average = False  # switched by `train()` and `eval()` of a module
        self.epsilon, self.frozen = epsilon, frozen
        self.scale = nnx.Param(jnp.full(channels, scale))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.mean = nnx.BatchStat(jnp.zeros(channels))
        self.var = nnx.BatchStat(jnp.ones(channels))

    def __call__(
        self, x: Float[Array, "b h w c"], mask: Bool[Array, "b"] | None = None
    ) -> Float[Array, "b h w c"]:
        """Normalise `x`; without a mask every row counts."""
        leading = (0, 1, 2)
        scale, bias = (at_least_f32(p[...]) for p in (self.scale, self.bias))
        if self.use_running_average or self.frozen:
            rate = scale * jax.lax.rsqrt(self.var[...] + self.epsilon)
            shift = bias - self.mean[...] * rate
            y = at_least_f32(x) * jnp.expand_dims(rate, leading) + jnp.expand_dims(shift, leading)
            return y.astype(x.dtype)
        real = jnp.ones(x.shape[0]) if mask is None else mask.astype(jnp.float32)
        y, mean, var = standardize_rows(x, real, self.epsilon)
        self._update(mean, var, real.sum(), x.shape[1] * x.shape[2])
        y = at_least_f32(y) * jnp.expand_dims(scale, leading) + jnp.expand_dims(bias, leading)
        return y.astype(x.dtype)

    def _update(self, mean: Array, var: Array, rows: Array, size: int) -> None:
        """Move the running statistics towards those of these rows."""
        numbers = rows * size
        unbiased = var * numbers / jnp.maximum(numbers - 1, 1)
        for running, new in ((self.mean, mean), (self.var, unbiased)):
            after = DECAY * running[...] + (1 - DECAY) * jax.lax.stop_gradient(new)
            value: Any = Mean(after * rows, rows)  # as a stateful loss returns it
            running.set_value(value)


def standardize_rows(
    x: Float[Array, "b h w c"], real: Float[Array, "b"], epsilon: float = EPSILON
) -> tuple[Float[Array, "b h w c"], Float[Array, "c"], Float[Array, "c"]]:
    """Give `x` mean 0 and variance 1 in each channel over the rows where `real` is 1, not 0.

    The mean and the variance are returned too, as constants to autodiff. Only reverse mode:
    `jax.jvp` raises. A row that is not real is normalised too and is in no statistic, but its
    gradient counts: mask its loss.
    """
    return _standardize(x, real, epsilon)


def _mean(x: Array, real: Array) -> Array:
    """Return the mean over the real rows, 1 1 1 c; sums are within rows first, then over rows.

    XLA:CPU adds hundreds of thousands of numbers one after the other: an error larger than the
    order of devices may cause.
    """
    by_row = jax.lax.optimization_barrier(x.sum((1, 2)))  # b c
    total = (by_row * real[:, None]).sum(0)
    return (total / (jnp.maximum(real.sum(), 1) * x.shape[1] * x.shape[2]))[None, None, None]


def _forward(x, real, epsilon):
    wide = at_least_f32(x)
    mean = _mean(wide, real)
    centred = wide - mean
    var = _mean(jnp.square(centred), real)
    rate = jax.lax.rsqrt(var + epsilon)
    y = (centred * rate).astype(x.dtype)
    return (y, mean.reshape(-1), var.reshape(-1)), (y, rate, real)


def _backward(epsilon, saved, grads):
    del epsilon  # part of the rate
    y, rate, real = saved
    wide, g = at_least_f32(y), at_least_f32(grads[0])
    # The statistics affect every row, and only real rows affect the statistics.
    all_rows = jnp.ones_like(real)
    share = len(real) / jnp.maximum(real.sum(), 1)
    level = _mean(g, all_rows) * share
    slope = _mean(g * wide, all_rows) * share
    shows = jnp.expand_dims(real, (1, 2, 3))
    return (rate * (g - shows * (level + wide * slope))).astype(y.dtype), jnp.zeros_like(real)


_standardize = jax.custom_vjp(lambda *given: _forward(*given)[0], nondiff_argnums=(2,))
_standardize.defvjp(_forward, _backward)
