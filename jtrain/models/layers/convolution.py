"""Convolutions over images."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.models.layers.pooling import max_pool


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
