"""Images, and convolutions over them."""

import math

import jax
import jax.numpy as jnp

IMAGE: tuple[int, int, int] = (28, 28, 1)  # height, width, channels


def as_images(x, mask, dtype):
    """Return images b h w c in `dtype`; bytes are scaled to 0 .. 1, hidden rows are 0."""
    x = x.reshape(len(x), *IMAGE)
    x = x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)
    return jnp.where(jnp.expand_dims(mask, (1, 2, 3)), x, jnp.zeros((), dtype))


def init_kernel(draws, size, inputs, outputs, std):
    """Return a kernel of a convolution."""
    drawn = draws.normal((size * size * inputs * outputs,), std)
    return drawn.reshape(size, size, inputs, outputs)


def convolve(x, kernel, stride=1):
    """Convolve, padded with zeros."""
    size = kernel.shape[0]
    sides = [((size - 1) // 2, size // 2)] * 2
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), sides, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def he(inputs):
    """Return the deviation of a kernel before a ReLU: He et al. 2015."""
    return math.sqrt(2 / inputs)
