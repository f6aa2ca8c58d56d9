"""Optimizers of servers whose workers take steps of their own: outer ones, and their states."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.types import Leaf, Params


class LocalStepsState(NamedTuple):
    """State of the outer optimizer, and of the inner one of each worker."""

    outer: optax.OptState
    inner: Any
    """The inner state, or all of a WorkerState; each leaf has a leading dim of the workers."""


class WorkerState(NamedTuple):
    """State of a worker that has more than the inner optimizer's; () for what it has not."""

    opt_state: optax.OptState
    residual: Any = ()
    """What compressed pushes have not sent so far, in float32."""
    params: Any = ()


class WithLocalSteps(optax.GradientTransformation):
    """The transformation of a run with local steps, the inner one, and the state of a worker."""

    inner: optax.GradientTransformation
    init_worker: Callable[[Params], Any]

    def __new__(cls, init: Any, update: Any, inner: optax.GradientTransformation, worker: Any):
        """Make the transformation of `init` and `update` with `inner`."""
        self = super().__new__(cls, init, update)
        self.inner, self.init_worker = inner, worker
        return self


def with_local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    workers: int,
    *,
    residual: bool = False,
    params: bool = False,
) -> WithLocalSteps:
    """Return the transformation whose state is that of a run with local steps.

    Its update is the outer step: the updates are the mean change of the workers, negated.

    Args:
        residual: whether workers keep what compressed pushes have not sent.
        params: whether workers have parameters of their own where the state is read.
    """

    def init_worker(like: Params) -> Any:
        state = inner.init(like)
        if not residual and not params:
            return state
        zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), like)
        return WorkerState(state, zeros if residual else (), like if params else ())

    def init(params: Params) -> LocalStepsState:
        state = init_worker(params)
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *jnp.shape(x))), state)
        return LocalStepsState(outer.init(params), copies)

    def update(updates: Params, state: LocalStepsState, params: Params | None = None):
        updates, after = outer.update(updates, state.outer, params)
        return updates, LocalStepsState(after, state.inner)

    return WithLocalSteps(init, update, inner, init_worker)


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


class PublishedState(NamedTuple):
    """State of the outer optimizer, and what workers have of the parameters."""

    outer: optax.OptState
    published: Params


def with_published(outer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the outer optimizer whose state also has the parameters as workers have them.

    An update leaves them as they are: the servers replace them when they publish a change.
    """

    def init(params: Params) -> PublishedState:
        return PublishedState(outer.init(params), jax.tree.map(jnp.copy, params))

    def update(updates: Params, state: Any, params: Params | None = None):
        updates, after = outer.update(updates, state.outer, params)
        return updates, PublishedState(after, state.published)

    return optax.GradientTransformation(init, update)
