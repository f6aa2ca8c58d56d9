"""Norms over the last dim."""

import jax
import jax.numpy as jnp

EPSILON: float = 1e-5
NORM: str = "layer"
BIAS: bool = True


def init_norm(width):
    """Return the parameters of a norm."""
    if NORM == "layer" and BIAS:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
    else:
        return {"scale": jnp.ones(width)}


def norm_last(layer, x):
    """Normalise over the last dim."""
    scale = jnp.expand_dims(layer["scale"], range(x.ndim - 1))
    if NORM == "rms":
        wide = x.astype(jnp.float32)
        rate = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON)
        return (wide * rate).astype(x.dtype) * scale
    else:
        y = layer_norm(x, jnp.zeros_like(x) + scale, layer["scale"])
        if BIAS:
            y = y + jnp.expand_dims(layer["bias"], range(x.ndim - 1))
        return y


@jax.custom_vjp
def layer_norm(x, scales, scale):
    """Return `x` with mean 0 and variance 1, times `scales`: `scale` for each row.

    Written with its gradient: autodiff of a mean and a variance saves more, and costs more.
    """
    return layer_norm_forward(x, scales, scale)[0]


def layer_norm_forward(x, scales, scale):
    """Save the input and its statistics, which are float32."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    centred = wide - mean
    rate = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON)
    y = centred * rate * scales.astype(jnp.float32)
    return y.astype(x.dtype), (x, mean, rate, scale)


def layer_norm_backward(saved, grad):
    """Return the gradients in `x` and `scales`."""
    x, mean, rate, scale = saved
    mean, rate = jax.lax.optimization_barrier((mean, rate))
    y, g = (x.astype(jnp.float32) - mean) * rate, grad.astype(jnp.float32)
    h = g * jnp.expand_dims(scale, range(x.ndim - 1)).astype(jnp.float32)
    slope = (h * y).mean(-1, keepdims=True)
    grad_x = rate * (h - h.mean(-1, keepdims=True) - y * slope)
    return grad_x.astype(x.dtype), (g * y).astype(scale.dtype), jnp.zeros_like(scale)


layer_norm.defvjp(layer_norm_forward, layer_norm_backward)
