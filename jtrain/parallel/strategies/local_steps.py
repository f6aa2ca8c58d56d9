"""The optimizer of a run whose workers take steps of their own: an inner and an outer one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.types import Params


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
    """The worker's own parameters."""


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
