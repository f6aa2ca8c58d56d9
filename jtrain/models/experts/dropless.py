"""Dropless experts: tokens sorted by expert, in groups of any size."""

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
    """Return the weighted sum of the outputs of each token's experts.

    A choice outside 0 .. e - 1 adds nothing: another device has the kernels of that expert.

    Args:
        feed: the MLP of an expert, `feed(product, tokens, *kernels)`.
    """
    experts, tokens, k = len(kernels[0]), x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    sort = queues(chosen.reshape(-1, k), experts)
    # The experts of a token differ, so at most `experts` of its choices are on this device.
    rows = len(tokens) * min(k, experts)
    at, end = jnp.arange(rows, dtype=chosen.dtype), sort.starts[-1]
    slots = ExpertSlots(
        of_choice=jnp.where(sort.rank < end, sort.rank, rows),
        choice=jnp.where(at < end, sort.order[:rows], sort.order.size),
    )
    sizes = jnp.diff(sort.starts)
    product = lambda rows, kernel: jax.lax.ragged_dot(rows, kernel, sizes)
    mixed = from_slots(feed(product, to_slots(tokens, slots), *kernels), slots)  # n k d
    return weighed(mixed.reshape(*chosen.shape, -1), weights)


def weighed(mixed: Float[Array, "*b k d"], weights: Float[Array, "*b k"]) -> Float[Array, "*b d"]:
    """Return the weighted sum over the experts of a token, summed in at least float32."""
    return (at_least_f32(mixed) * weights[..., None]).sum(-2).astype(mixed.dtype)
