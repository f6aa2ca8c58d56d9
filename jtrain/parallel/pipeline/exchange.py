"""Exchange of microbatches: all move on by one stage, and one leaves as one enters.

The gradients are written out: autodiff would make twice as many permutations, and save masks for
every turn.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.parallel.pipeline.schedule import PipelineSchedule


class ExchangePlan(NamedTuple):
    """Schedule of the entering microbatches, and the handling of turns without one."""

    schedule: PipelineSchedule
    skips: bool  # such a turn sends nothing, by a branch


def exchange(plan: ExchangePlan, turn: Any, waiting: Any, moving: Any) -> tuple[Any, Any]:
    """Swap the microbatch that leaves with the one that enters."""
    inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    swap = lambda *pair: (_swap if inexact(pair[0]) else _swapped)(plan, turn, *pair)
    both = jax.tree.map(swap, waiting, moving)
    pick = lambda index: jax.tree.map(lambda _, pair: pair[index], moving, both)
    return pick(0), pick(1)


def _swapped(plan, turn, waiting, moving):
    group, here, enters = _turn(plan.schedule, turn, moving)
    column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
    # A microbatch moves to stage 0 when needed, and back in as many turns.
    out = _move_if(plan, enters, functools.partial(_moved, -1), jnp.where(here, moving, column))
    waiting = jax.lax.dynamic_update_index_in_dim(waiting, out, group, 1)
    return waiting, jnp.where(here, column, moving)


def _swap_back(plan, turn, grads):
    waiting, moving = grads
    group, here, enters = _turn(plan.schedule, turn, moving)
    column = jax.lax.dynamic_index_in_dim(waiting, group, 1, keepdims=False)
    out = _move_if(plan, enters, functools.partial(_moved, 1), column)
    column = jnp.where(here, moving, out)
    waiting = jax.lax.dynamic_update_index_in_dim(waiting, column, group, 1)
    return None, waiting, jnp.where(here, out, moving)


def _turn(schedule, turn, moving):
    """Return the group of the turn, a mask of the entering stage, and whether one enters."""
    period = schedule.stages * schedule.repeats
    enters = True if schedule.repeats == 1 else turn % period < schedule.stages
    first = (jnp.arange(schedule.stages) == 0).reshape(-1, *[1] * (moving.ndim - 1))
    return turn // period, enters & first, enters


def _move_if(plan, enters, move, x):
    if enters is True:
        return move(x)
    return (
        jax.lax.cond(enters, move, lambda x: x, x) if plan.skips else jnp.where(enters, move(x), x)
    )


# Autodiff would save masks as large as the arrays for every turn.
_swap = jax.custom_vjp(_swapped, nondiff_argnums=(0,))
_swap.defvjp(lambda plan, turn, *x: (_swapped(plan, turn, *x), turn), _swap_back)


def roll(x: Any, by: int) -> Any:
    """Roll by one stage, with one permutation between devices."""
    return _rolled(by, x) if jnp.issubdtype(x.dtype, jnp.inexact) else _moved(by, x)


def _moved(by, x):
    # Without a barrier the compiler makes the two parts of `x` separately and sends each.
    x = jax.lax.optimization_barrier(x)
    parts = [x[-1:], x[:-1]] if by > 0 else [x[1:], x[:1]]
    return jnp.concatenate(parts)


# By autodiff the gradient would be two permutations and a sum.
_rolled = jax.custom_vjp(_moved, nondiff_argnums=(0,))
_rolled.defvjp(lambda by, x: (_moved(by, x), None), lambda by, _, grad: (_moved(-by, grad),))
