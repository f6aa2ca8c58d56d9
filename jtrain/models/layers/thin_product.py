"""Products of many rows with a single column or row, with gradients summed in blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCK = 1024  # rows


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
