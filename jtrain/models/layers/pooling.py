"""Max pooling without `reduce_window`, whose gradient XLA runs slowly."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def max_pool(
    x: Float[Array, "b h w c"], window: int, stride: int | None = None, padding: int = 0
) -> Float[Array, "b i j c"]:
    """Return the maximum of each `window` x `window` square at every `stride`, `window` if None.

    `padding` adds that many rows and columns of -inf on each side; an incomplete window at the end
    is dropped. i = (h + 2 padding - window) // stride + 1. Equal
    maxima share the gradient, as in `jnp.max`.

    `reduce_window` gives the same numbers, but its gradient is a select-and-scatter: forward and
    backward pass of 2x2 windows on 128 x 28 x 28 x 32 and 128 x 14 x 14 x 64, in the step of a CNN,
    take XLA:CPU 70 ms of 173 that way (benchmarks/cnn_step.py); of a ResNet's first pool, 3x3
    windows every 2 on 8 x 112 x 112 x 64, 270 ms against 50 ms here.
    """
    stride = window if stride is None else stride
    if window == stride and padding == 0:
        b, h, w, c = x.shape
        rows, columns = h // window, w // window
        x = x[:, : rows * window, : columns * window]
        return _tile_max(x.reshape(b, rows, window, columns, window, c))
    # A barrier: fused into one pass, each number of the first would be computed two or three times.
    x = jax.lax.optimization_barrier(_along(x, 1, window, stride, padding))
    return _along(x, 2, window, stride, padding)


@jax.custom_jvp
def _tile_max(x: Float[Array, "b i m j n c"]) -> Float[Array, "b i j c"]:
    """Return the maximum of each tile of `m` x `n`."""
    return x.max((2, 4))


@_tile_max.defjvp
def _tile_max_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Return the maxima, and the mean tangent of each tile's equal maxima.

    What the backward pass needs of `x` is a byte for each number, 1 at a maximum, and their count:
    autodiff of a maximum saves `x` and writes the comparison in the type of `x`.
    """
    (x,), (tangent,) = primals, tangents
    y = _tile_max(x)
    hits = x == y[:, :, None, :, None]
    count = hits.sum((2, 4), dtype=jnp.int32).astype(tangent.dtype)
    share = hits.astype(tangent.dtype) / count[:, :, None, :, None]
    return y, (tangent * share).sum((2, 4))


def _along(x: Array, dim: int, window: int, stride: int, padding: int) -> Array:
    """Return the maximum of each window of one dim: element o of all windows is a strided slice.

    The slices are taken by reshape, whose gradient is a plain copy.
    """
    count = (x.shape[dim] + 2 * padding - window) // stride + 1
    strides = -(-window // stride) + count - 1  # complete strides that the windows reach into
    after = strides * stride - x.shape[dim] - padding
    # The cut-off end is smaller than a window, so no window holds only padding.
    sides = [(0, 0, 0)] * x.ndim
    sides[dim] = (padding, after, 0)
    x = jax.lax.pad(x, jnp.array(-jnp.inf, x.dtype), sides)
    x = x.reshape(*x.shape[:dim], strides, stride, *x.shape[dim + 1 :])
    slices = [
        jax.lax.slice_in_dim(
            jax.lax.index_in_dim(x, o % stride, dim + 1, keepdims=False),
            o // stride,
            o // stride + count,
            1,
            dim,
        )
        for o in range(window)
    ]
    return functools.reduce(jnp.maximum, slices)
