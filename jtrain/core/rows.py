"""Rows of a batch: their random keys, and which of them a mask hides."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jtrain.core.pytree import named_leaves
from jtrain.core.types import Batch, Key
from jtrain.errors import LossError

THREEFRY = "threefry2x32"
_RAGGED = ContextVar("ragged", default=False)


@overload
def row_keys(rng: Key, batch: Batch) -> Shaped[Array, "b"]: ...
@overload
def row_keys(rng: None, batch: Batch) -> None: ...
def row_keys(rng: Key | None, batch: Batch) -> Shaped[Array, "b"] | None:
    """Return a key for each row, from its index in the global batch, on whatever device it is.

    `rng=None` (evaluation: nothing is drawn) gives None. The keys are of threefry, whatever
    `jax_default_prng_impl` is.
    """
    if rng is None:
        return None
    return jax.vmap(jax.random.fold_in, (None, 0))(threefry(rng), batch["row"])


def threefry(keys: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return keys of threefry, each made of all words of a key; those of threefry are returned.

    `jax.vmap` of a draw by keys of rbg or unsafe_rbg draws for all of them from the first, so that
    the draws of a row would depend on the rows beside it.
    """
    if jax.random.key_impl(keys) == THREEFRY:
        return keys
    typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if typed and keys.ndim:
        return jax.vmap(threefry)(keys)
    made = jax.random.key(0, impl=THREEFRY)
    for word in jax.random.key_data(keys) if typed else keys:
        made = jax.random.fold_in(made, word)
    return made


@contextlib.contextmanager
def allow_hidden_rows(ragged: bool) -> Iterator[None]:
    """Set, while a loss is traced, whether a mask may hide rows of its batch."""
    token = _RAGGED.set(ragged)
    try:
        yield
    finally:
        _RAGGED.reset(token)


def check_no_hidden_rows(what: str) -> None:
    """Check that no mask may hide a row of the batch of the loss that is being traced.

    Raises:
        LossError: if one may, with the ways to make every batch full.
    """
    if _RAGGED.get():
        raise LossError(
            f"{what} takes every row it sees into its statistics, and this data has batches with "
            f'rows that a mask hides. Leave the short batch out (`Shuffled(..., end="drop")`), or '
            f"take a layer that gets the mask (flax's BatchNorm does) or meets no rows (layer "
            f"norm, group norm)."
        )


def with_rows(batch: Batch, *, copies: bool = False) -> Batch:
    """Return `batch`, with the `row` and `mask` of a full batch where it has none.

    Raises:
        LossError: if there are several `copies`, none of which knows its rows, or rows differ.
    """
    if "row" in batch and "mask" in batch:
        return batch
    if copies:
        raise LossError(
            f"the batch has {', '.join(sorted(batch))} and no `row` or no `mask`. Each copy of the "
            f"step sees a part of the batch: add `row` (int32, the index in the whole batch) and "
            f"`mask` (bool) on the host."
        )
    shapes = {name: jnp.shape(leaf) for name, leaf in named_leaves(batch).items()}
    if () in shapes.values() or len({shape[0] for shape in shapes.values()}) > 1:
        raise LossError(
            f"the arrays of a batch need one value for each row, and have the shapes {shapes}: "
            f"repeat a number by `np.full(rows, number)`."
        )
    rows = next(iter(shapes.values()))[0]
    return {"row": jnp.arange(rows, dtype=jnp.int32), "mask": jnp.ones(rows, bool), **batch}
