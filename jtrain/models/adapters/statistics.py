"""Running statistics of a layer that is not ours, handed back by a loss."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jtrain.core.mean import Mean
from jtrain.core.types import Extra, Leaf


def replaced(old: Extra, new: Extra, mask: Bool[Array, "b"]) -> Extra:
    """`new`, as a stateful loss returns it: a Mean where a leaf is another than in `old`.

    A foreign batch norm gives its next running statistics whole, and no sums over rows. With
    `couples="batch"` the rows that it saw are all rows, and `new` comes out bit for bit. With
    `couples="slice"` the state becomes the mean of what the slices gave, each weighted by its share
    of real rows (`mask`), and a slice without any counts for nothing; the variance between slices
    is in no slice's variance, so it is smaller than that of the whole batch. Whole numbers, such as
    counters, are not weighted.
    """
    real = jnp.mean(mask, dtype=jnp.float32)  # exactly 1 where every row is

    def leaf(before: Leaf, after: Leaf) -> Any:
        if after is before:
            return before
        inexact = jnp.issubdtype(after.dtype, jnp.inexact)
        weight = real if inexact else (real > 0).astype(jnp.float32)
        return Mean(jnp.where(real > 0, after.astype(jnp.float32) * weight, 0), weight)

    return jax.tree.map(leaf, old, new)


def carried(old: Extra, new: Extra, mask: Bool[Array, "b"]) -> Extra:
    """Return `new` as a stateful loss returns it, whatever layers of whomever it has.

    Those of this package give Means already; the others as `replaced` has them.
    """
    if not jax.tree.leaves(old):
        return old
    leaf = lambda before, after: after if isinstance(after, Mean) else replaced(before, after, mask)
    return jax.tree.map(leaf, old, new)
