"""LayerNorm and RMSNorm: functions with closed-form backward passes, and modules."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.core.pytree import at_least_f32


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


EPSILON = 1e-5  # as in GPT-2


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
    return _forward(epsilon, x, scales, scale)[0]


def _forward(epsilon, x, scales, scale):
    wide = at_least_f32(x)
    mean = wide.mean(-1, keepdims=True)
    centred = wide - mean
    rate = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    y = centred * rate * at_least_f32(scales)
    return y.astype(jnp.result_type(x, scale)), (x, mean, rate, scale)


def _backward(epsilon, saved, grad):
    del epsilon  # part of the rate
    x, mean, rate, scale = saved
    y, g = (at_least_f32(x) - mean) * rate, at_least_f32(grad)
    h = g * at_least_f32(jnp.expand_dims(scale, range(x.ndim - 1)))
    slope = (h * y).mean(-1, keepdims=True)
    grad_x = rate * (h - h.mean(-1, keepdims=True) - y * slope)
    return grad_x.astype(x.dtype), (g * y).astype(scale.dtype), jnp.zeros_like(scale)


_scaled.defvjp(_forward, _backward)


class Norm(nnx.Module):
    """LayerNorm with its scale and bias, or RMSNorm with its scale.

    Args:
        zero_centered: multiply by 1 + scale, in at least float32, with scales that begin at 0.
    """

    def __init__(
        self,
        width: int,
        *,
        kind: Literal["layer", "rms"],
        epsilon: float,
        bias: bool,
        zero_centered: bool = False,
    ):
        self.kind, self.epsilon, self.zero_centered = kind, epsilon, zero_centered
        # The dim has no mesh axis; its name is there so that a stack of layers can be recognised.
        no_name: Any = {"dims": (None,)}
        scale = jnp.zeros(width) if zero_centered else jnp.ones(width)
        self.scale = nnx.Param(scale, **no_name)
        biased = bias and kind == "layer"
        self.bias = nnx.Param(jnp.zeros(width), **no_name) if biased else None

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Normalise `x` over its last dim."""
        scale, bias = self.scale[...], None if self.bias is None else self.bias[...]
        if self.zero_centered:  # 1 + a small bfloat16 would round the scale away
            scale, bias = 1 + at_least_f32(scale), None if bias is None else at_least_f32(bias)
        wide = at_least_f32(x) if self.zero_centered else x
        if self.kind == "rms":
            return rms_norm(wide, scale, epsilon=self.epsilon).astype(x.dtype)
        return layer_norm(wide, scale, bias, epsilon=self.epsilon).astype(x.dtype)
