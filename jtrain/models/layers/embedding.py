"""Embeddings: rows of a table by index, with a gradient that stays exact for many tokens."""

import jax.numpy as jnp
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
        return table[index]
    # Every n-th position of a row: a sequence that is split over devices stays split.
    block = jnp.arange(index.shape[1], dtype=index.dtype)[None] % blocks
    tables = jnp.broadcast_to(table[None], (blocks, *table.shape))
    return tables[block, index]


def count_blocks(tokens: int, rows: int) -> int:
    """Return the number of blocks of a batch of `tokens`, for a table of `rows`."""
    return max(1, min(MOST, tokens // BLOCK, tokens // (ROOM * rows)))
