"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
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
