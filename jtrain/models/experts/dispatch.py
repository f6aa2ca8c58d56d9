"""Tokens to where their experts compute, and back: gathers whose gradients are gathers too.

A choice is one of the k experts of one of the n tokens, n k of them; a slot is a place at an
expert. Each choice has a slot or none, each slot a choice or none: to have none is to point past
the end. Left to autodiff, the gradient of a gather adds up in an order that a GPU does not keep.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class ExpertSlots(NamedTuple):
    """Which choice is in which slot, said both ways."""

    of_choice: Int[Array, "n k"]  # m where the choice has none
    choice: Int[Array, "m"]  # n k where the slot has none


@jax.custom_vjp
def to_slots(x: Float[Array, "n d"], slots: ExpertSlots) -> Float[Array, "m d"]:
    """The token in each slot, zeros where there is none."""
    return _taken(x, slots.choice // slots.of_choice.shape[1])


@jax.custom_vjp
def from_slots(y: Float[Array, "m d"], slots: ExpertSlots) -> Float[Array, "n k d"]:
    """What is in the slot of each choice, zeros where it has none."""
    return _taken(y, slots.of_choice)


def _taken(x, at):
    return x.at[at].get(mode="fill", fill_value=0)


def _to_slots_back(slots, grad):
    return _taken(grad, slots.of_choice).sum(1), _nothing(slots)


def _from_slots_back(slots, grad):
    return _taken(grad.reshape(-1, grad.shape[-1]), slots.choice), _nothing(slots)


def _nothing(slots):
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), slots)


to_slots.defvjp(lambda x, slots: (to_slots(x, slots), slots), _to_slots_back)
from_slots.defvjp(lambda y, slots: (from_slots(y, slots), slots), _from_slots_back)


class ExpertQueues(NamedTuple):
    """The choices of some tokens, by expert, and in the order of the tokens for each."""

    order: Int[Array, "n*k"]  # choices, those of expert 0 first
    rank: Int[Array, "n k"]  # where each stands in that order
    starts: Int[Array, "e+1"]  # where each expert's begin; last, where those of none do


def queues(chosen: Int[Array, "n k"], experts: int) -> ExpertQueues:
    """The choices of each expert; those outside 0 .. experts - 1 are of none, and come last."""
    known = (chosen >= 0) & (chosen < experts)
    flat = jnp.where(known, chosen, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rank = jnp.argsort(order).reshape(chosen.shape)
    before = flat[:, None] < jnp.arange(experts + 1, dtype=flat.dtype)[None]
    return ExpertQueues(order, rank, before.sum(0, dtype=jnp.int32))
