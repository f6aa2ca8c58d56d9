"""Frozen weights in 8 or 4 bits: blocks of 64 numbers with one scale each."""

import dataclasses
import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jtrain.core.types import Leaf

Bits: TypeAlias = Literal["int8", "nf4"]
BLOCK = 64  # numbers that share a scale

# The 16 values of a 4-bit NormalFloat: quantiles of a standard normal, the largest scaled to 1.
# Source: Dettmers et al. 2023 (QLoRA), arXiv 2305.14314, appendix E.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_BETWEEN = (NF4[1:] + NF4[:-1]) / 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Array in 8 or 4 bits, or a stack of such arrays with the leading dims of the fields.

    Numbers are in row-major order, in blocks of 64. If 64 divides the last dim, the other dims stay
    as they are and are split over devices as those of the array: `i o` becomes `i o/64 64`. Else
    the array is flat, and its last block is filled up with zeros. A number is `scale x code` (int8)
    or `scale x NF4[code]` (nf4). The largest number of a block is 127 or 1 times its scale. In nf4
    a byte holds two codes, the first in its upper half.
    """

    codes: Leaf  # int8 *n ... blocks 64, or uint8 *n ... blocks 32
    scales: Leaf  # f32 *n ... blocks
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Shape of one array."""
    bits: Bits = dataclasses.field(metadata={"static": True})


def quantize(x: Float[Array, "..."], bits: Bits, *, stack: int = 0) -> Quantized:
    """Quantize an array, or each array of a stack with `stack` leading dims.

    Source: Dettmers et al. 2023 (QLoRA), arXiv 2305.14314, equations 1 to 4.
    """
    before, shape = x.shape[:stack], x.shape[stack:]
    wide = x.astype(jnp.float32)
    if not keeps_dims(shape):
        wide = wide.reshape(*before, -1)
        wide = jnp.pad(wide, [(0, 0)] * stack + [(0, -wide.shape[-1] % BLOCK)])
    blocks = wide.reshape(*wide.shape[:-1], -1, BLOCK)
    scales = jnp.abs(blocks).max(-1) * (np.float32(1 / 127) if bits == "int8" else 1)
    ratio = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    if bits == "int8":
        codes = jnp.round(ratio).astype(jnp.int8)
    else:
        nearest = jnp.searchsorted(jnp.asarray(_BETWEEN), ratio).astype(jnp.uint8)
        codes = (nearest[..., ::2] << 4) | nearest[..., 1::2]
    return Quantized(codes, scales, shape, bits)


def dequantize(x: Quantized) -> Float[Array, "..."]:
    """Return the array, or the stack of arrays, in float32."""
    if x.bits == "int8":
        values = x.codes.astype(jnp.float32)
    else:
        halves = jnp.stack([x.codes >> 4, x.codes & 15], -1)
        values = jnp.asarray(NF4)[halves.reshape(*x.codes.shape[:-1], BLOCK)]
    values = values * x.scales[..., None]
    if keeps_dims(x.shape):
        return values.reshape(*values.shape[: -len(x.shape) - 1], *x.shape)
    before = x.scales.shape[:-1]
    return values.reshape(*before, -1)[..., : math.prod(x.shape)].reshape(*before, *x.shape)


def keeps_dims(shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape is stored with its dims, in blocks of the last one."""
    return len(shape) > 0 and shape[-1] % BLOCK == 0
