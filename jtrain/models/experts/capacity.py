"""Experts with a capacity: a fixed number of places each."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.placement import Placement
from jtrain.models.experts.dispatch import ExpertSlots, from_slots, queues, to_slots


def within_capacity(
    feed: Callable[[Array], Array],
    x: Float[Array, "b t d"],
    chosen: Int[Array, "b t k"],
    *,
    experts: int,
    places: int,
    placement: Placement,
) -> Float[Array, "b t k d"]:
    """Return the output of each expert that a token chose; zeros where no place was left.

    Args:
        feed: the experts' MLPs, b e c d -> b e c d, with c places.
        places: places of a row at each expert; the earlier tokens of the row take them first.
    """
    slots = jax.vmap(lambda row: _slots(row, experts, places))(chosen)
    # First rows are split over the devices of their axes, then experts over theirs: the change is
    # an all-to-all.
    by_row = lambda y: placement.constrain(y, "batch", None, None, "width")
    by_expert = lambda y: placement.constrain(y, "batch", "experts", None, "width")
    x = placement.constrain(x, "batch", None, "width")  # a row's tokens compete with one another
    inputs = jax.vmap(to_slots)(x, slots)
    inputs = by_expert(by_row(inputs.reshape(len(x), experts, places, -1)))
    outputs = by_row(by_expert(feed(inputs)))
    return jax.vmap(from_slots)(outputs.reshape(len(x), experts * places, -1), slots)


def _slots(chosen: Int[Array, "t k"], experts: int, places: int) -> ExpertSlots:
    """Return slots e c that hold the first `places` choices of each expert."""
    sort, none = queues(chosen, experts), experts * places
    place = sort.rank - sort.starts[chosen]
    of_choice = jnp.where(place < places, chosen * places + place, none)
    at = sort.starts[:-1, None] + jnp.arange(places, dtype=chosen.dtype)[None]  # e c
    taken: Bool[Array, "e c"] = at < sort.starts[1:, None]
    choice = jnp.where(taken, sort.order.at[at].get(mode="clip"), chosen.size)
    return ExpertSlots(of_choice, choice.reshape(-1))
