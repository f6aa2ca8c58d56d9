"""The rows of a batch: which are real, and what each one draws."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jtrain.errors import LossError
from jtrain.types import Batch, Key


def row_keys(rng: Key, batch: Batch) -> Shaped[Array, "b"]:
    """A key for each row from its index in the global batch, whatever device it is on."""
    return jax.vmap(jax.random.fold_in, (None, 0))(rng, batch["row"])


def with_rows(batch: Batch, *, copies: bool = False) -> Batch:
    """`batch` with the `row` and `mask` of a full batch where it has none of its own.

    Raises:
        LossError: if there are several `copies` of the step: none knows its place in the batch.
    """
    if "row" in batch and "mask" in batch:
        return batch
    if copies:
        raise LossError(
            f"the batch has {', '.join(sorted(batch))} and no `row` or no `mask`. Each copy of the "
            f"step sees a part of the batch: add `row` (int32, the index in the whole batch) and "
            f"`mask` (bool) on the host."
        )
    rows = len(jax.tree.leaves(batch)[0])
    return {"row": jnp.arange(rows, dtype=jnp.int32), "mask": jnp.ones(rows, bool), **batch}
