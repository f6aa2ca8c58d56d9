"""Linear maps and tables of embeddings, whose gradients stay exact for many rows."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jtrain.models.layers.dropout import KeySequence
from jtrain.models.layers.low_rank import LowRank
from jtrain.parallel.explicit import gathered, is_explicit, keeps_split, product

BLOCK = 1024  # rows of a product in blocks, at least
TOKENS = 4096  # of a block of tokens, at least
MOST = 32  # blocks of tokens
ROOM = 8  # the blocks' gradients are at most 1 / ROOM of the incoming gradient


def thin_product(rows: Float[Array, "n i"], kernel: Float[Array, "i o"]) -> Float[Array, "n o"]:
    """Return `rows @ kernel`, for a kernel with one input or one output.

    The gradient is the product of a matrix and a vector as long as there are rows. XLA:CPU adds its
    terms one after the other, and those of a product of two matrices in blocks: with 262,144 rows
    the gradient was off by 7.8e-6, in blocks of 1,024 rows by 6e-8, at the same cost
    (benchmarks/large_batches.py). Other kernels, and fewer rows than two blocks, are one product.
    """
    blocks = count_blocks(len(rows)) if 1 in kernel.shape else 1
    if blocks == 1:
        return rows @ kernel
    # A copy of the kernel for each block: the gradients of the copies are added at the end.
    copies = jnp.broadcast_to(kernel[None], (blocks, *kernel.shape))
    parts = jax.lax.dot_general(
        rows.reshape(blocks, -1, rows.shape[1]), copies, (((2,), (1,)), ((0,), (0,)))
    )
    return parts.reshape(-1, kernel.shape[1])


def count_blocks(rows: int) -> int:
    """Return the largest power of two that divides `rows` into blocks that are long enough."""
    blocks = 1
    while rows % (2 * blocks) == 0 and rows // (2 * blocks) >= BLOCK:
        blocks *= 2
    return blocks


class Linear(nnx.Module):
    """x W + b, with a `kernel` of shape (narrow, wide).

    With the 512 inputs of an MLP's second map as rows the kernel's gradient runs at 56 GFLOP/s on
    one core, as columns at 105 (jax 0.10). So a map that narrows stores its kernel as (outputs,
    inputs). In the place of its kernel may be a `LowRank`: a frozen kernel with a trained term.
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
        value = std * jax.random.normal(rngs.params(), shape)
        self.kernel = nnx.Param(value, dims=named, transposed=not self.widens)
        self.bias = nnx.Param(jnp.zeros(outputs), dims=dims[1:]) if bias else None

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        """Apply the map at each position."""
        kernel = self.kernel.get_value()
        # Dims that are split over explicit axes each are not one dim that is split.
        flat = self.flat and not is_explicit()
        rows = x.reshape(-1, x.shape[-1]) if flat else x
        if isinstance(kernel, LowRank):
            y = kernel.product(self._product, rows) + kernel.term(x, complete=self.flat, flat=flat)
        else:
            y = self._product(rows, kernel)
        y = y if self.bias is None else y + self.bias[...].reshape(*[1] * (y.ndim - 1), -1)
        return y.reshape(*x.shape[:-1], -1)

    def _product(self, rows: Float[Array, "*b i"], kernel: Float[Array, "..."]) -> Array:
        if self.flat and 1 in kernel.shape and not is_explicit():
            return thin_product(rows, kernel if self.widens else kernel.T)
        return product(rows, kernel, 0 if self.widens else 1)


def look_up(table: Float[Array, "v d"], index: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Return the rows of `table` at `index`.

    Backward, a scatter adds the gradients of equal tokens one after the other, and float32 rounds
    every partial sum: with 131,072 tokens of 65 kinds the table's gradient was off by 3.9e-6
    (benchmarks/large_batches.py). So large batches are split into blocks of at least 4,096 tokens,
    whose sums are added at the end: off by 2e-7. Small batches, and tables of more rows than an
    eighth of the tokens, stay one block.
    """
    return keeps_split(_look_up, 2)(index, gathered(table))


def _look_up(index, table):
    count = min(index.size // TOKENS, index.size // (ROOM * len(table)))
    blocks = max(1, min(MOST, count))
    if blocks == 1:
        return take_rows(table, index)
    # Every n-th position of a row: a sequence that is split over devices stays split.
    block = jnp.arange(index.shape[1], dtype=index.dtype)[None] % blocks
    tables = jnp.broadcast_to(table[None], (blocks, *table.shape))
    return tables[block, index]


def take_rows(table: Float[Array, "v d"], index: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Return `table[index]`; the gradients of equal tokens are added in at least float32.

    A bfloat16 of 256 or more does not grow when 1 is added, so that the gradient of a token which
    is a hundredth of a batch would stand still halfway. Reverse mode alone in half precision.
    """
    take = _take_rows if table.dtype.itemsize < 4 else lambda table, index: table[index]
    return keeps_split(lambda index, table: take(table, index), 2)(index, gathered(table))


@jax.custom_vjp
def _take_rows(table, index):
    return table[index]


def _rows_forward(table, index):
    return table[index], (table, index)


def _rows_backward(saved, grad):
    table, index = saved
    total = jnp.zeros(table.shape, jnp.float32).at[index].add(grad.astype(jnp.float32))
    return total.astype(table.dtype), np.zeros(index.shape, jax.dtypes.float0)


_take_rows.defvjp(_rows_forward, _rows_backward)


@jax.custom_vjp
def add_positions(
    x: Float[Array, "b t d"], positions: Float[Array, "t d"]
) -> Float[Array, "b t d"]:
    """Return `x` plus a vector of its type for each position.

    The backward pass sums over the rows in at least float32, behind a barrier: for a plain sum of
    32 rows or more XLA:GPU lays the rows out innermost, in each array of each layer before and
    after, and transposes them for every product. Only reverse mode: `jax.jvp` raises.
    """
    return x + positions[None]


def _positions_forward(x, positions):
    return add_positions(x, positions), None


def _positions_backward(_, grad):
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    flat = jax.lax.optimization_barrier(grad.reshape(len(grad), -1))
    total = flat.astype(wide).sum(0).reshape(grad.shape[1:])
    return grad, total.astype(grad.dtype)


add_positions.defvjp(_positions_forward, _positions_backward)
