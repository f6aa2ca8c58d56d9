"""Dispatch of tokens to their experts and back: dropless, or with a fixed number of places each."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32


class ExpertSlots(NamedTuple):
    """Slot of each choice, and choice of each slot."""

    of_choice: Int[Array, "n k"]  # m where the choice has none
    choice: Int[Array, "m"]  # n k where the slot has none


@jax.custom_vjp
def to_slots(x: Float[Array, "n d"], slots: ExpertSlots) -> Float[Array, "m d"]:
    """Return the token in each slot; zeros in an empty slot."""
    return _gather(x, slots.choice // slots.of_choice.shape[1])


@jax.custom_vjp
def from_slots(y: Float[Array, "m d"], slots: ExpertSlots) -> Float[Array, "n k d"]:
    """Return the value in the slot of each choice; zeros for a choice without a slot."""
    return _gather(y, slots.of_choice)


def _gather(x, at):
    return x.at[at].get(mode="fill", fill_value=0)


def _to_slots_back(slots, grad):
    return _gather(grad, slots.of_choice).sum(1), _no_gradient(slots)


def _from_slots_back(slots, grad):
    return _gather(grad.reshape(-1, grad.shape[-1]), slots.choice), _no_gradient(slots)


def _no_gradient(slots):
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), slots)


to_slots.defvjp(lambda x, slots: (to_slots(x, slots), slots), _to_slots_back)
from_slots.defvjp(lambda y, slots: (from_slots(y, slots), slots), _from_slots_back)


class ExpertQueues(NamedTuple):
    """The choices of some tokens, sorted by expert, then by token."""

    order: Int[Array, "n*k"]  # the choices, sorted
    rank: Int[Array, "n k"]  # index of each choice in `order`
    starts: Int[Array, "e+1"]  # first index of each expert; last, of choices without an expert


def queues(chosen: Int[Array, "n k"], experts: int) -> ExpertQueues:
    """Sort the choices by expert; choices outside 0 .. experts - 1 come last."""
    known = (chosen >= 0) & (chosen < experts)
    flat = jnp.where(known, chosen, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rank = jnp.argsort(order).reshape(chosen.shape)
    before = flat[:, None] < jnp.arange(experts + 1, dtype=flat.dtype)[None]
    return ExpertQueues(order, rank, before.sum(0, dtype=jnp.int32))


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
    return sum_weighted(mixed.reshape(*chosen.shape, -1), weights)


def sum_weighted(
    mixed: Float[Array, "*b k d"], weights: Float[Array, "*b k"]
) -> Float[Array, "*b d"]:
    """Return the weighted sum over the experts of a token, summed in at least float32."""
    return (at_least_f32(mixed) * weights[..., None]).sum(-2).astype(mixed.dtype)


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
