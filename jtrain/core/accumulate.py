"""Sums over microbatches of what a function of rows returns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.interpret import pruned
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Batch, Tree
from jtrain.errors import ConfigError


def accumulate(
    fn: Callable[[Batch], Tree],
    microbatches: int,
    *,
    unroll: bool = False,
    few: int = 0,
    place: Callable[[Tree], Tree] = lambda sums: sums,
) -> Callable[[Batch], Tree]:
    """Return `batch -> fn(batch)` for an `fn` that returns sums over rows, one slice at a time.

    Slice i takes rows i, i + n, i + 2n ...: a batch split over devices stays split, with no
    communication. Sums are in at least float32. `unroll` writes the slices out one after
    the other, for what XLA runs slowly in a loop (convolutions on CPU); so they are where the sums
    of all need at most `few` operations. `place` puts the sums so far on their devices.

    Raises:
        ConfigError: if the rows do not divide into the microbatches.
    """
    if microbatches == 1:
        return lambda batch: place(fn(batch))

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)  # n b/n ...

    def summed(batch: Batch) -> Tree:
        _check_divides(batch, microbatches)
        slices: Any = jax.tree.map(split, batch)
        widened = lambda part: at_least_f32(fn(part))
        each = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], slices))
        flat = unroll
        if few and not unroll:
            widened, operations = pruned(widened, each)
            flat = microbatches * operations <= few
        shapes = jax.eval_shape(widened, each)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        add = lambda total, part: (place(jax.tree.map(jnp.add, total, widened(part))), None)
        return jax.lax.scan(add, place(zeros), slices, unroll=microbatches if flat else 1)[0]

    return summed


def _check_divides(batch: Batch, microbatches: int) -> None:
    rows = len(jax.tree.leaves(batch)[0])
    if rows % microbatches:
        lower = rows - rows % microbatches
        raise ConfigError(
            f"{microbatches} microbatches do not divide the {rows} rows that each copy of the step "
            f"gets. Nearest: {lower or microbatches} or {lower + microbatches} rows, by `batch`."
        )
