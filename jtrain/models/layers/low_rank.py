"""Frozen weights: in 8 or 4 bits, and with a low-rank term beside them (LoRA); no flax."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jtrain.core.types import Leaf
from jtrain.errors import LossError
from jtrain.models.layers.dropout import drop
from jtrain.parallel.explicit import product

Bits: TypeAlias = Literal["int8", "nf4"]
BLOCK = 64  # numbers that share a scale

# The 16 values of a 4-bit NormalFloat: quantiles of a standard normal, the largest scaled to 1.
# Source: Dettmers et al. 2023 (QLoRA), arXiv 2305.14314, appendix E.
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """Frozen array W with the trained term `scale x A B`, in the place of a parameter.

    A layer may compute `x W + scale x (x A) B`, which needs no gradient of W's shape; `merged` is
    the sum as one array. A stack of layers has leading dims in every field.

    Source: Hu et al. 2021 (LoRA), arXiv 2106.09685, equation 3.
    """

    frozen: Leaf | Quantized  # *n i o, or *n o i where `transposed`
    a: Leaf  # *n i r
    b: Leaf  # *n r o
    keys: Leaf | None  # *n b
    """Keys of the rows, for dropout of the input of A; None: no dropout."""
    scale: float = dataclasses.field(metadata={"static": True})
    rate: float = dataclasses.field(metadata={"static": True})
    """Dropout rate."""
    transposed: bool = dataclasses.field(metadata={"static": True})
    """Whether W is stored as (outputs, inputs)."""

    def dense(self) -> Float[Array, "..."]:
        """Return W in the type of the term."""
        return as_dense(self.frozen, self.a.dtype)

    def product(
        self, call: Callable[[Array, Array], Array], x: Float[Array, "*b i"]
    ) -> Float[Array, "..."]:
        """Return `call(x, W)`.

        Where W is stored as another type, the backward pass makes the numbers again: a dense W of
        every layer would otherwise stay in memory from the forward pass on, 425 MB of SmolLM2-135M.
        """
        dense = lambda frozen: as_dense(frozen, self.a.dtype)
        if not isinstance(self.frozen, Quantized) and self.frozen.dtype == self.a.dtype:
            return call(x, self.frozen)
        return jax.checkpoint(lambda x, frozen: call(x, dense(frozen)))(x, self.frozen)

    def merged(self) -> Float[Array, "..."]:
        """Return W + scale x A B."""
        return add_product(self.dense(), self.a, self.b, self.scale, transposed=self.transposed)

    def term(self, x: Float[Array, "*b i"], *, complete: bool, flat: bool) -> Float[Array, "..."]:
        """Return `scale x (x A) B`; `flat` flattens the dims before the inputs.

        Args:
            complete: whether the rows of `x` are those of the keys.

        Raises:
            LossError: if rows are dropped where their keys do not belong to `x`.
        """
        if self.keys is not None:
            if not complete or len(self.keys) != len(x):
                raise LossError(
                    f"lora.dropout={self.rate} needs complete rows with a key each, and this "
                    f"layer gets x {list(x.shape)} for {len(self.keys)} keys: a pipeline or an "
                    f"axis over time splits them. Write lora.dropout=0, or another parallel.kind."
                )
            x = drop(x, self.rate, self.keys)
        x = x.reshape(-1, x.shape[-1]) if flat else x
        return self.scale * product(product(x, self.a, 0), self.b, 0)


def as_dense(x: Leaf | Quantized, dtype: Any) -> Leaf:
    """Return an array as numbers of this type; arrays that are not floating stay as they are."""
    if isinstance(x, Quantized):
        return dequantize(x).astype(dtype)
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def add_product(w: Leaf, a: Leaf, b: Leaf, scale: float, *, transposed: bool) -> Leaf:
    """Return `w + scale x a b`, for `w` of any shape with as many numbers as the product."""
    product = a @ b
    product = product.swapaxes(-1, -2) if transposed else product
    return w + scale * product.reshape(w.shape)
