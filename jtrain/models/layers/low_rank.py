"""Low-rank terms beside frozen kernels (LoRA)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.core.types import Leaf
from jtrain.errors import LossError
from jtrain.models.layers.dropout import drop
from jtrain.models.layers.quantized import Quantized, dequantize


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

    def term(self, x: Float[Array, "*b i"], *, flat: bool) -> Float[Array, "..."]:
        """Return `scale x (x A) B`; `flat` flattens the dims before the inputs.

        Raises:
            LossError: if rows are dropped where their keys do not belong to `x`.
        """
        if self.keys is not None:
            if not flat or len(self.keys) != len(x):
                raise LossError(
                    f"lora.dropout={self.rate} needs complete rows with a key each, and this "
                    f"layer gets x {list(x.shape)} for {len(self.keys)} keys: a pipeline or an "
                    f"axis over time splits them. Write lora.dropout=0, or another parallel.kind."
                )
            x = drop(x, self.rate, self.keys)
        x = x.reshape(-1, x.shape[-1]) if flat else x
        return self.scale * ((x @ self.a) @ self.b)


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
