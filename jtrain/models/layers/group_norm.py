"""Group normalisation, which couples no rows, with a closed-form backward pass."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jtrain.core.pytree import at_least_f32

EPSILON = 1e-5


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
        y = standardize_groups(x.reshape(b, h * w, self.groups, c // self.groups)).reshape(x.shape)
        scale, bias = (jnp.expand_dims(p[...], (0, 1, 2)) for p in (self.scale, self.bias))
        return (at_least_f32(y) * at_least_f32(scale) + at_least_f32(bias)).astype(x.dtype)


@jax.custom_vjp
def standardize_groups(x: Float[Array, "b n g k"]) -> Float[Array, "b n g k"]:
    """Give `x` mean 0 and variance 1 over n and k, computed in at least float32.

    Only reverse mode: `jax.jvp` and `jax.hessian` raise.
    """
    return _forward(x)[0]


def _mean(x: Array) -> Array:
    return x.mean((1, 3), keepdims=True)


def _forward(x):
    wide = at_least_f32(x)
    centred = wide - _mean(wide)
    rate = jax.lax.rsqrt(_mean(jnp.square(centred)) + EPSILON)
    y = (centred * rate).astype(x.dtype)
    return y, (y, rate)


def _backward(saved, grad):
    y, rate = saved
    wide, g = at_least_f32(y), at_least_f32(grad)
    return ((rate * (g - _mean(g) - wide * _mean(g * wide))).astype(y.dtype),)


standardize_groups.defvjp(_forward, _backward)
