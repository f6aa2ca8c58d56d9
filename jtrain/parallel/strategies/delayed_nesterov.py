"""Delayed Nesterov momentum: the outer optimizer of workers that push at their own pace."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.types import Leaf, Params


class DelayedNesterovState(NamedTuple):
    """Momentum, and the sum of the gradients since it was updated."""

    count: Leaf
    momentum: Params
    total: Params


def delayed_nesterov(lr: float, momentum: float, delay: int) -> optax.GradientTransformation:
    """Return SGD whose momentum is updated with the mean of `delay` gradients, after the last one.

    Each gradient g moves the parameters by -lr x g / delay; the last of `delay` also by -lr x
    momentum x m, with the new m = momentum x m + the mean. With `delay` 1 it is SGD with Nesterov
    momentum.

    Source: Liu et al. 2024, algorithm 3 with c = 0, https://arxiv.org/abs/2401.09135.
    """

    def init(params: Params) -> DelayedNesterovState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DelayedNesterovState(jnp.int32(0), zeros, zeros)

    def update(updates: Params, state: Any, params: Params | None = None):
        del params
        count = state.count + 1
        due = count % delay == 0

        def leaf(grad: Any, before: Any, total: Any) -> tuple[Any, Any, Any]:
            total = total + grad
            after = jnp.where(due, momentum * before + total / delay, before)
            step = grad / delay + jnp.where(due, momentum * after, 0)
            return -lr * step, after, jnp.where(due, 0, total)

        found = jax.tree.map(leaf, updates, state.momentum, state.total)
        updates, after, total = jax.tree.transpose(
            jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), found
        )
        return updates, DelayedNesterovState(count, after, total)

    return optax.GradientTransformation(init, update)
