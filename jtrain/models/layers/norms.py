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
    y: Array = standardize(x, epsilon)  # typed: pyright does not see through custom_vjp
    y = y * jnp.expand_dims(scale, leading)
    return y if bias is None else y + jnp.expand_dims(bias, leading)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def standardize(x: Float[Array, "*b d"], epsilon: float = EPSILON) -> Float[Array, "*b d"]:
    """Give `x` mean 0 and variance 1 over its last dim.

    Autodiff of a mean and a variance costs XLA:CPU a fifth of the step of a small transformer
    (benchmarks/transformer_step.py); this saves the result and 1 / deviation. Scale and bias stay
    outside, so that every argument varies with the rows.
    """
    return _forward(x, epsilon)[0]


def _forward(x, epsilon):
    wide = at_least_f32(x)
    centred = wide - wide.mean(-1, keepdims=True)
    rate = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    y = (centred * rate).astype(x.dtype)
    return y, (y, rate)


def _backward(epsilon, saved, grad):
    del epsilon  # part of the rate
    y, rate = saved
    wide, g = at_least_f32(y), at_least_f32(grad)
    slope = (g * wide).mean(-1, keepdims=True)
    return ((rate * (g - g.mean(-1, keepdims=True) - wide * slope)).astype(y.dtype),)


standardize.defvjp(_forward, _backward)


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
