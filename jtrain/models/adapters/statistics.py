"""Running statistics of other libraries' layers, as a stateful loss returns them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jtrain.core.mean import Mean
from jtrain.core.types import Extra, Leaf


def replaced(old: Extra, new: Extra, mask: Bool[Array, "b"]) -> Extra:
    """Return `new` as a stateful loss does: a Mean where a leaf is not that of `old`.

    A batch norm of another library returns its next running statistics, and no sums over rows. With
    `couples="batch"` its rows are all rows, and `new` is returned bit for bit. With
    `couples="slice"` the state becomes the mean over the slices, each weighted by its share of real
    rows (`mask`); a slice without real rows counts for nothing. The variance between slices is in
    no slice's variance, so the result is smaller than the variance of the whole batch. Integers,
    such as counters, are not weighted.
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
    """Return `new` as a stateful loss does, for layers of any library.

    Layers of this package return Means already; the others are handled by `replaced`.
    """
    if not jax.tree.leaves(old):
        return old
    leaf = lambda before, after: after if isinstance(after, Mean) else replaced(before, after, mask)
    return jax.tree.map(leaf, old, new)
