"""Microbatches on their way: all move on by one stage, and one comes out where one enters.

Written out with their gradients: left to autodiff they would be twice as many permutations, and
masks would be kept for every turn.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.parallel.pipeline.schedule import PipelineSchedule


class ExchangePlan(NamedTuple):
    """When one enters, and how a turn is spent in which none does."""

    schedule: PipelineSchedule
    skips: bool  # sends nothing then, by a branch


def exchange(how: ExchangePlan, turn: Any, waiting: Any, moving: Any) -> tuple[Any, Any]:
    """Where one comes out and one goes in, both in the place of the other."""
    exact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    swap = lambda *pair: (_swap if exact(pair[0]) else _swapped)(how, turn, *pair)
    both = jax.tree.map(swap, waiting, moving)
    pick = lambda index: jax.tree.map(lambda _, pair: pair[index], moving, both)
    return pick(0), pick(1)


def _swapped(how, turn, waiting, moving):
    group, here, enters = _now(how.schedule, turn, moving)
    column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
    # One moves to stage 0 as it is wanted there, and home again in as many turns.
    out = _only_if(how, enters, functools.partial(_moved, -1), jnp.where(here, moving, column))
    waiting = jax.lax.dynamic_update_index_in_dim(waiting, out, group, 1)
    return waiting, jnp.where(here, column, moving)


def _swap_back(how, turn, grads):
    waiting, moving = grads
    group, here, enters = _now(how.schedule, turn, moving)
    column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
    out = _only_if(how, enters, functools.partial(_moved, 1), column)
    column = jnp.where(here, moving, out)
    waiting = jax.lax.dynamic_update_index_in_dim(waiting, column, group, 1)
    return None, waiting, jnp.where(here, out, moving)


def _now(schedule, turn, moving):
    """The group that enters, where it does, and whether one does."""
    whole = schedule.stages * schedule.repeats
    enters = True if schedule.repeats == 1 else turn % whole < schedule.stages
    first = (jnp.arange(schedule.stages) == 0).reshape(-1, *[1] * (moving.ndim - 1))
    return turn // whole, enters & first, enters


def _only_if(how, yes, move, x):
    if yes is True:
        return move(x)
    return jax.lax.cond(yes, move, lambda x: x, x) if how.skips else jnp.where(yes, move(x), x)


# Left to autodiff, it would keep its masks for every turn, as large as what they hide.
_swap = jax.custom_vjp(_swapped, nondiff_argnums=(0,))
_swap.defvjp(lambda how, turn, *x: (_swapped(how, turn, *x), turn), _swap_back)


def roll(x: Any, by: int) -> Any:
    """By one place: one permutation between devices."""
    return _rolled(by, x) if jnp.issubdtype(x.dtype, jnp.inexact) else _moved(by, x)


def _moved(by, x):
    # Else the compiler cuts out the two parts where `x` is made, and sends each by itself.
    x = jax.lax.optimization_barrier(x)
    parts = [x[-1:], x[:-1]] if by > 0 else [x[1:], x[:1]]
    return jnp.concatenate(parts)


# Left to autodiff, its gradient would be two permutations and a sum.
_rolled = jax.custom_vjp(_moved, nondiff_argnums=(0,))
_rolled.defvjp(lambda by, x: (_moved(by, x), None), lambda by, _, grad: (_moved(-by, grad),))
