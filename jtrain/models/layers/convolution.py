"""Convolutions over images."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Convolution(nnx.Module):
    """A `kernel` x `kernel` convolution with a padding of `kernel // 2` zeros.

    The size is divided by the stride and rounded up. The parameter `kernel` is (rows, columns,
    inputs, outputs).
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
        rngs: nnx.Rngs,
    ):
        # Scaled by the outputs, so that gradients keep their size backward: He et al. 2015,
        # https://arxiv.org/abs/1502.01852, equation 14.
        std = math.sqrt(2 / (kernel * kernel * outputs)) if std is None else std
        shape = (kernel, kernel, inputs, outputs)
        self.stride = stride
        # Drawn flat, with the same numbers: a draw of 4 dims takes XLA:CPU 7 times as long to
        # compile (jax 0.10), and a network has dozens.
        drawn = jax.random.normal(rngs.params(), (math.prod(shape),))
        self.kernel = nnx.Param(std * drawn.reshape(shape))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: Float[Array, "b h w i"]) -> Float[Array, "b y x o"]:
        """Convolve `x`."""
        y = convolve(x, self.kernel[...], stride=self.stride)
        return y if self.bias is None else y + self.bias[...][None, None, None]


def convolve(
    x: Float[Array, "b h w i"], kernel: Float[Array, "k k i o"], *, stride: int = 1
) -> Float[Array, "b y x o"]:
    """Convolve `x` with `kernel` at every `stride`, padded with zeros."""
    size = kernel.shape[0]
    sides = ((size - 1) // 2 if stride == 1 else size // 2, size // 2)
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), (sides, sides), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
