"""Embeddings: rows of a table by index, with a gradient that many tokens do not blur."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 4096  # tokens
MOST = 32  # blocks
ROOM = 8  # the gradients of the blocks take this share of the gradient that comes in, at most


def look_up(table: Float[Array, "v d"], index: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Return the rows of `table` at `index`.

    Backward, a scatter adds the gradients of all tokens of a kind one after the other, and float32
    rounds every partial sum: of 131,072 tokens of 65 kinds the table's gradient was off by 3.9e-6
    (benchmarks/large_batches.py). So large batches are dealt into blocks of at least 4,096 tokens,
    each with a sum of its own, which are added at the end: off by 2e-7. Small batches, and tables
    of more rows than an eighth of the tokens, stay one block.
    """
    blocks = count_blocks(index.size, len(table))
    if blocks == 1:
        return table[index]
    # Every n-th position of a row: a sequence that is split over devices stays so.
    block = jnp.arange(index.shape[1], dtype=index.dtype)[None] % blocks
    copies = jnp.broadcast_to(table[None], (blocks, *table.shape))
    return copies[block, index]


def count_blocks(tokens: int, rows: int) -> int:
    """Return into how many blocks so many `tokens` are dealt, for a table of so many `rows`."""
    return max(1, min(MOST, tokens // BLOCK, tokens // (ROOM * rows)))
