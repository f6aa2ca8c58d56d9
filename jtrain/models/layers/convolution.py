"""Convolutions over images, and max pooling without `reduce_window`, which XLA runs slowly."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.parallel.explicit import keeps_split


class Convolution(nnx.Module):
    """A `kernel` x `kernel` convolution with a padding of `kernel // 2` zeros.

    A kernel of an even size has one zero less before the image. The size is divided by the stride
    and rounded up. The parameter `kernel` is (rows, columns, inputs, outputs).

    Args:
        same: pad as TensorFlow does: only the zeros that the windows reach, and of an odd number
            one more at the end.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        bias: bool = False,
        std: float | None = None,
        same: bool = False,
        rngs: nnx.Rngs,
    ):
        # Scaled by the outputs, so that gradients keep their size backward: He et al. 2015,
        # https://arxiv.org/abs/1502.01852, equation 14.
        std = math.sqrt(2 / (kernel * kernel * outputs)) if std is None else std
        shape = (kernel, kernel, inputs, outputs)
        self.stride, self.same = stride, same
        # Drawn flat, with the same numbers: a draw of 4 dims takes XLA:CPU 7 times as long to
        # compile (jax 0.10), and a network has dozens.
        drawn = jax.random.normal(rngs.params(), (math.prod(shape),))
        self.kernel = nnx.Param(std * drawn.reshape(shape))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: Float[Array, "b h w i"], *, pool: int = 1) -> Float[Array, "b y x o"]:
        """Convolve `x`, and take the maximum of each `pool` x `pool` square.

        The maxima are taken before the bias is added. Adding a number keeps the order, also when
        the sums are rounded, so the outputs are the same, and fewer numbers are added.
        """
        y = convolve(x, self.kernel[...], stride=self.stride, same=self.same)
        y = max_pool(y, pool) if pool > 1 else y
        return y if self.bias is None else y + self.bias[...][None, None, None]


def convolve(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "k k i o"],
    *,
    stride: int = 1,
    same: bool = False,
) -> Float[Array, "b y x o"]:
    """Convolve `x` with `kernel` at every `stride`, padded with zeros as `Convolution` says."""
    size = kernel.shape[0]
    even = ((size - 1) // 2, size // 2)
    sides = [_same_padding(n, size, stride) if same else even for n in x.shape[1:3]]
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), sides, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


class DepthwiseConvolution(nnx.Module):
    """A `kernel` x `kernel` convolution of each channel alone, padded as TensorFlow does.

    The parameter `kernel` is (rows, columns, 1, channels).
    """

    def __init__(self, channels: int, kernel: int, *, stride: int = 1, rngs: nnx.Rngs):
        self.stride = stride
        drawn = jax.random.normal(rngs.params(), (kernel * kernel * channels,))
        std = math.sqrt(2) / kernel  # each output is a sum of kernel^2 products
        self.kernel = nnx.Param(std * drawn.reshape(kernel, kernel, 1, channels))

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b y x c"]:
        """Convolve each channel of `x`."""
        return convolve_channels(x, self.kernel[...], stride=self.stride)


def convolve_channels(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k 1 c"], *, stride: int = 1
) -> Float[Array, "b y x c"]:
    """Convolve each channel of `x` with its own kernel: a sum of shifted images.

    A convolution with a group for each channel gives the same, and XLA:CPU runs it 20 to 150 times
    slower: 32 x 16 x 16 x 144 with kernels of 5 x 5 every 2 take 18 ms that way and 0.6 ms here,
    with the gradients 350 and 24 ms (two cores, jax 0.10).
    """
    size = kernel.shape[0]
    before_after = [_same_padding(n, size, stride) for n in x.shape[1:3]]
    height, width = (-(-n // stride) for n in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), *before_after, (0, 0)))
    reach = lambda start, count: slice(start, start + (count - 1) * stride + 1, stride)
    shifted = (
        x[:, reach(i, height), reach(j, width)] * kernel[i, j][None, None]
        for i in range(size)
        for j in range(size)
    )
    return functools.reduce(jnp.add, shifted)


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the zeros before and after a dim that its windows reach."""
    count = -(-size // stride)
    reached = max((count - 1) * stride + kernel - size, 0)
    return reached // 2, reached - reached // 2


@keeps_split
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
    x = jax.lax.optimization_barrier(max_along(x, 1, window, stride, (padding, padding)))
    return max_along(x, 2, window, stride, (padding, padding))


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


def max_along(
    x: Array,
    dim: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    maximum: Callable[[Array, Array], Array] = jnp.maximum,
) -> Array:
    """Return the maximum of each window of one dim: element o of all windows is a strided slice.

    The slices are taken by reshape, whose gradient is a plain copy.
    """
    count = (x.shape[dim] + sum(padding) - window) // stride + 1
    strides = -(-window // stride) + count - 1  # complete strides that the windows reach into
    after = strides * stride - x.shape[dim] - padding[0]
    # The cut-off end is smaller than a window, so no window holds only padding.
    sides = [(0, 0, 0)] * x.ndim
    sides[dim] = (padding[0], after, 0)
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
    return functools.reduce(maximum, slices)
