"""Experts that take all that is sent to them: tokens sorted by expert, groups of any size."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.core.pytree import at_least_f32
from jtrain.models.experts.dispatch import ExpertSlots, from_slots, queues, to_slots


def dropless(
    feed: Callable[..., Array],
    x: Float[Array, "b t d"],
    chosen: Int[Array, "b t k"],
    weights: Float[Array, "b t k"],
    *kernels: Float[Array, "e _ _"],
) -> Float[Array, "b t d"]:
    """The weighted sum of what each token gets of the experts that it chose.

    A choice outside 0 .. e - 1 adds nothing: it is of an expert whose kernels are not here.

    Args:
        feed: the MLP of an expert, `feed(product, tokens, *kernels)`.
    """
    experts, tokens, k = len(kernels[0]), x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    lines = queues(chosen.reshape(-1, k), experts)
    # A token's experts differ, so that no more of its choices than there are experts are here.
    rows = len(tokens) * min(k, experts)
    at, end = jnp.arange(rows, dtype=chosen.dtype), lines.starts[-1]
    slots = ExpertSlots(
        of_choice=jnp.where(lines.rank < end, lines.rank, rows),
        choice=jnp.where(at < end, lines.order[:rows], lines.order.size),
    )
    sizes = jnp.diff(lines.starts)
    product = lambda rows, kernel: jax.lax.ragged_dot(rows, kernel, sizes)
    mixed = from_slots(feed(product, to_slots(tokens, slots), *kernels), slots)  # n k d
    return weighed(mixed.reshape(*chosen.shape, -1), weights)


def weighed(mixed: Float[Array, "*b k d"], weights: Float[Array, "*b k"]) -> Float[Array, "*b d"]:
    """The sum over a token's experts, added up in at least float32."""
    return (at_least_f32(mixed) * weights[..., None]).sum(-2).astype(mixed.dtype)
