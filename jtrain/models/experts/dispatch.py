"""Dispatch of tokens to the slots of their experts, and back, by gathers.

A choice is one of the k experts of one of the n tokens, n k in all; a slot is a place at an expert.
Each choice has at most one slot and each slot at most one choice: an index past the end means none.
The gradients are gathers too: the gradient that autodiff makes of a gather is a scatter, which on a
GPU adds up in an order that changes from run to run.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


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
