"""Rows in chunks within a loss that couples all rows of a batch, where microbatches cannot be."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from jtrain.errors import LossError


def map_rows(call: Callable[[Any], Array], rows: Any, chunks: int) -> Array:
    """Return `call(rows)`, computed a chunk of rows after the other.

    The backward pass computes each chunk again, so that the memory of `call` is that of a chunk;
    the outputs of all rows then meet in the loss, whose gradient is that of the whole batch. A
    chunk has rows of every device: rows 0, c, 2 c, ... of c chunks.

    Args:
        call: a function of rows b ... that gives b ..., in which no row depends on another.
        rows: a tree of arrays b ....
        chunks: number of chunks, which divides b; 1 calls the function as it is.

    Raises:
        LossError: if the rows do not divide into the chunks.

    Source: Gao et al. 2021 (GradCache), arXiv 2101.06983.
    """
    count = len(jax.tree.leaves(rows)[0])
    if chunks < 1 or count % chunks:
        near = [n for n in range(1, count + 1) if count % n == 0]
        raise LossError(
            f"{count} rows do not divide into chunks={chunks}. Set "
            f"chunks={min(near, key=lambda n: abs(n - chunks))}, or another number of rows."
        )
    if chunks == 1:
        return call(rows)
    split = lambda x: x.reshape(count // chunks, chunks, *x.shape[1:]).swapaxes(0, 1)
    outputs = jax.lax.map(jax.checkpoint(call), jax.tree.map(split, rows))
    return outputs.swapaxes(0, 1).reshape(count, *outputs.shape[2:])
