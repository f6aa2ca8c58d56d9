"""Experts with so many places each."""

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
    place: Placement,
) -> Float[Array, "b t k d"]:
    """What each token gets of each expert that it chose; zeros where there was no place left.

    Args:
        feed: the experts' MLPs, b e c d -> b e c d, c being the places.
        places: for each row at each expert; its earlier tokens take them first.
    """
    slots = jax.vmap(lambda row: _slots(row, experts, places))(chosen)
    # Rows on all devices of their axes, then experts on theirs: exchanging one for the other is an
    # all-to-all.
    by_row = lambda y: place.constrain(y, "batch", None, None, "width")
    by_expert = lambda y: place.constrain(y, "batch", "experts", None, "width")
    x = place.constrain(x, "batch", None, "width")  # a row's tokens compete with one another
    inputs = jax.vmap(to_slots)(x, slots)
    inputs = by_expert(by_row(inputs.reshape(len(x), experts, places, -1)))
    outputs = by_row(by_expert(feed(inputs)))
    return jax.vmap(from_slots)(outputs.reshape(len(x), experts * places, -1), slots)


def _slots(chosen: Int[Array, "t k"], experts: int, places: int) -> ExpertSlots:
    """Slots e c, the first `places` choices of each expert in them."""
    lines, none = queues(chosen, experts), experts * places
    place = lines.rank - lines.starts[chosen]
    of_choice = jnp.where(place < places, chosen * places + place, none)
    at = lines.starts[:-1, None] + jnp.arange(places, dtype=chosen.dtype)[None]  # e c
    taken: Bool[Array, "e c"] = at < lines.starts[1:, None]
    choice = jnp.where(taken, lines.order.at[at].get(mode="clip"), chosen.size)
    return ExpertSlots(of_choice, choice.reshape(-1))
