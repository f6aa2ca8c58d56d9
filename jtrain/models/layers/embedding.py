"""Embeddings: rows of a table by index, with a gradient that stays exact for many tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

BLOCK = 4096  # tokens
MOST = 32  # blocks
ROOM = 8  # the blocks' gradients are at most 1 / ROOM of the incoming gradient


def look_up(table: Float[Array, "v d"], index: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Return the rows of `table` at `index`.

    Backward, a scatter adds the gradients of equal tokens one after the other, and float32 rounds
    every partial sum: with 131,072 tokens of 65 kinds the table's gradient was off by 3.9e-6
    (benchmarks/large_batches.py). So large batches are split into blocks of at least 4,096 tokens,
    whose sums are added at the end: off by 2e-7. Small batches, and tables of more rows than an
    eighth of the tokens, stay one block.
    """
    blocks = count_blocks(index.size, len(table))
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
    return _take_rows(table, index) if table.dtype.itemsize < 4 else table[index]


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


def count_blocks(tokens: int, rows: int) -> int:
    """Return the number of blocks of a batch of `tokens`, for a table of `rows`."""
    return max(1, min(MOST, tokens // BLOCK, tokens // (ROOM * rows)))


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
