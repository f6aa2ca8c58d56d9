"""Linear maps, stored in the layout that XLA:CPU multiplies fastest."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.models.layers.key_sequence import KeySequence
from jtrain.models.layers.thin_product import thin_product


class Linear(nnx.Module):
    """x W + b, with a `kernel` of shape (narrow, wide).

    With the 512 inputs of an MLP's second map as rows the kernel's gradient runs at 56 GFLOP/s on
    one core, as columns at 105 (jax 0.10). So a map that narrows stores its kernel as (outputs,
    inputs).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        std: float = 0.02,
        dims: tuple[str | None, str | None] = (None, None),
        flat: bool = True,
        rngs: nnx.Rngs | KeySequence,
    ):
        """Draw the kernel.

        Args:
            dims: the names of the inputs' and of the outputs' dim.
            flat: flatten the dims before the inputs. An eighth faster on a CPU; but a second dim
                that is split over devices would be gathered first.
        """
        self.widens, self.flat = outputs >= inputs, flat
        shape = (inputs, outputs) if self.widens else (outputs, inputs)
        named = dims if self.widens else dims[::-1]
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape), dims=named)
        self.bias = nnx.Param(jnp.zeros(outputs), dims=dims[1:]) if bias else None

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        """Apply the map at each position."""
        kernel, dim = self.kernel[...], 0 if self.widens else 1
        rows = x.reshape(-1, x.shape[-1]) if self.flat else x
        if self.flat and 1 in kernel.shape:
            y = thin_product(rows, kernel if self.widens else kernel.T)
        else:
            y = jax.lax.dot_general(rows, kernel, (((rows.ndim - 1,), (dim,)), ((), ())))
        y = y if self.bias is None else y + self.bias[...].reshape(*[1] * (y.ndim - 1), -1)
        return y.reshape(*x.shape[:-1], -1)
