"""Norms with closed-form backward passes: LayerNorm and RMSNorm, batch norm and group norm."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.parallel.explicit import keeps_split


def rms_norm(
    x: Float[Array, "*b d"], scale: Float[Array, "d"], *, epsilon: float = 1e-5
) -> Float[Array, "*b d"]:
    """Divide `x` by the root of its mean square along the last dim, and multiply by `scale`.

    Statistics are computed in at least float32; `epsilon` is added to the mean square.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    wide = at_least_f32(x)
    rate = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * rate).astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))


EPSILON = 1e-5  # as in GPT-2 and in the published ResNets


def layer_norm(
    x: Float[Array, "*b d"],
    scale: Float[Array, "d"],
    bias: Float[Array, "d"] | None = None,
    *,
    epsilon: float = EPSILON,
) -> Float[Array, "*b d"]:
    """Give `x` mean 0 and variance 1 over its last dim, times `scale`, plus `bias`.

    Statistics are computed in at least float32; `epsilon` is added to the variance. Only
    reverse mode: `jax.jvp` and `jax.hessian` raise.

    Source: Ba et al. 2016, https://arxiv.org/abs/1607.06450.
    """
    leading = range(x.ndim - 1)
    # Plus zeros like `x`, and not broadcast: inside of `shard_map` it then varies as the rows do.
    scales = jnp.zeros_like(x, scale.dtype) + jnp.expand_dims(scale, leading)
    y: Array = _scaled(epsilon, x, scales, scale)  # typed: pyright does not see through custom_vjp
    return y if bias is None else y + jnp.expand_dims(bias, leading)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled(epsilon, x, scales, scale):
    """Return the layer norm of `x`, times `scales`.

    Autodiff of a mean and a variance costs XLA:CPU a fifth of the step of a small transformer
    (benchmarks/transformer_step.py). This saves `x`, its mean and 1 / deviation, and not the
    standardized `x`, an array more to write and to keep.

    Args:
        scales: `scale` for each row; it has the gradient, which autodiff adds up over the rows.
        scale: what is saved of it.
    """
    return _layer_forward(epsilon, x, scales, scale)[0]


def _layer_forward(epsilon, x, scales, scale):
    wide = at_least_f32(x)
    mean = wide.mean(-1, keepdims=True)
    centred = wide - mean
    rate = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    y = centred * rate * at_least_f32(scales)
    return y.astype(jnp.result_type(x, scale)), (x, mean, rate, scale)


def _layer_backward(epsilon, saved, grad):
    del epsilon  # part of the rate
    x, mean, rate, scale = saved
    # Behind a barrier: else XLA:GPU computes the mean again from `x` and writes `g * y` for the
    # sum over rows, 14 passes over an array of the size of `x` in place of 12.
    mean, rate = jax.lax.optimization_barrier((mean, rate))
    y, g = (at_least_f32(x) - mean) * rate, at_least_f32(grad)
    h = g * at_least_f32(jnp.expand_dims(scale, range(x.ndim - 1)))
    slope = (h * y).mean(-1, keepdims=True)
    grad_x = rate * (h - h.mean(-1, keepdims=True) - y * slope)
    return grad_x.astype(x.dtype), (g * y).astype(scale.dtype), jnp.zeros_like(scale)


_scaled.defvjp(_layer_forward, _layer_backward)


DECAY = 0.9  # of the running statistics a step, as in the published ResNets


class BatchNorm(nnx.Module):
    """`x` with mean 0 and variance 1 in each channel, times `scale`, plus `bias`.

    In training the statistics are those of the batch's rows that the mask shows, so rows interact:
    the model declares `rows_interact="batch"`. Statistics are computed in at least float32, and the
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
        standardized: Any = standardize_rows(x, real, self.epsilon)  # custom_vjp
        y, mean, var = standardized
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def standardize_rows(
    x: Float[Array, "b h w c"], real: Float[Array, "b"], epsilon: float = EPSILON
) -> tuple[Float[Array, "b h w c"], Float[Array, "c"], Float[Array, "c"]]:
    """Give `x` mean 0 and variance 1 in each channel over the rows where `real` is 1, not 0.

    The mean and the variance are returned too, as constants to autodiff. Only reverse mode:
    `jax.jvp` raises. A row that is not real is normalised too and is in no statistic, but its
    gradient counts: mask its loss.
    """
    return _batch_forward(x, real, epsilon)[0]


def _mean_of_rows(x: Array, real: Array) -> Array:
    """Return the mean over the real rows, 1 1 1 c; sums are within rows first, then over rows.

    XLA:CPU adds hundreds of thousands of numbers one after the other: an error larger than the
    order of devices may cause.
    """
    by_row = jax.lax.optimization_barrier(x.sum((1, 2)))  # b c
    total = (by_row * real[:, None]).sum(0)
    return (total / (jnp.maximum(real.sum(), 1) * x.shape[1] * x.shape[2]))[None, None, None]


def _batch_forward(x, real, epsilon):
    wide = at_least_f32(x)
    mean = _mean_of_rows(wide, real)
    centred = wide - mean
    var = _mean_of_rows(jnp.square(centred), real)
    rate = jax.lax.rsqrt(var + epsilon)
    y = (centred * rate).astype(x.dtype)
    return (y, mean.reshape(-1), var.reshape(-1)), (y, rate, real)


def _batch_backward(epsilon, saved, grads):
    del epsilon  # part of the rate
    y, rate, real = saved
    wide, g = at_least_f32(y), at_least_f32(grads[0])
    # The statistics affect every row, and only real rows affect the statistics.
    all_rows = jnp.ones_like(real)
    share = len(real) / jnp.maximum(real.sum(), 1)
    level = _mean_of_rows(g, all_rows) * share
    slope = _mean_of_rows(g * wide, all_rows) * share
    shows = jnp.expand_dims(real, (1, 2, 3))
    return (rate * (g - shows * (level + wide * slope))).astype(y.dtype), jnp.zeros_like(real)


standardize_rows.defvjp(_batch_forward, _batch_backward)


class GroupNorm(nnx.Module):
    """Each image with mean 0 and variance 1 in each group of channels, times `scale`, plus `bias`.

    Source: Wu and He 2018, https://arxiv.org/abs/1803.08494.
    """

    def __init__(self, channels: int, *, groups: int, scale: float = 1.0):
        assert channels % groups == 0, f"{channels} channels in {groups} groups"
        self.groups = groups
        self.scale = nnx.Param(jnp.full(channels, scale))
        self.bias = nnx.Param(jnp.zeros(channels))

    def __call__(
        self, x: Float[Array, "b h w c"], mask: Bool[Array, "b"] | None = None
    ) -> Float[Array, "b h w c"]:
        """Normalise `x`; the mask changes nothing, as rows are independent."""
        del mask
        b, h, w, c = x.shape
        by_group = lambda x: x.reshape(b, h * w, self.groups, c // self.groups)
        y = keeps_split(lambda x: standardize_groups(by_group(x)).reshape(x.shape))(x)
        scale, bias = (jnp.expand_dims(p[...], (0, 1, 2)) for p in (self.scale, self.bias))
        return (at_least_f32(y) * at_least_f32(scale) + at_least_f32(bias)).astype(x.dtype)


@jax.custom_vjp
def standardize_groups(x: Float[Array, "b n g k"]) -> Float[Array, "b n g k"]:
    """Give `x` mean 0 and variance 1 over n and k, computed in at least float32.

    Only reverse mode: `jax.jvp` and `jax.hessian` raise.
    """
    return _group_forward(x)[0]


def _mean_of_groups(x: Array) -> Array:
    return x.mean((1, 3), keepdims=True)


def _group_forward(x):
    wide = at_least_f32(x)
    centred = wide - _mean_of_groups(wide)
    rate = jax.lax.rsqrt(_mean_of_groups(jnp.square(centred)) + EPSILON)
    y = (centred * rate).astype(x.dtype)
    return y, (y, rate)


def _group_backward(saved, grad):
    y, rate = saved
    wide, g = at_least_f32(y), at_least_f32(grad)
    return ((rate * (g - _mean_of_groups(g) - wide * _mean_of_groups(g * wide))).astype(y.dtype),)


standardize_groups.defvjp(_group_forward, _group_backward)
