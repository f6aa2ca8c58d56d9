"""The optimizer of a run whose workers take steps of their own: an inner and an outer one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.types import Params


class LocalStepsState(NamedTuple):
    """State of the outer optimizer, and of the inner one of each worker."""

    outer: optax.OptState
    inner: Any
    """The inner state; each leaf has a leading dim of the workers."""


class WithLocalSteps(optax.GradientTransformation):
    """The transformation of a run with local steps, and the inner one."""

    inner: optax.GradientTransformation

    def __new__(cls, init: Any, update: Any, inner: optax.GradientTransformation):
        """Make the transformation of `init` and `update` with `inner`."""
        self = super().__new__(cls, init, update)
        self.inner = inner
        return self


def with_local_steps(
    inner: optax.GradientTransformation, outer: optax.GradientTransformation, workers: int
) -> WithLocalSteps:
    """Return the transformation whose state is that of a run with local steps.

    Its update is the outer step: the updates are the mean change of the workers, negated.
    """

    def init(params: Params) -> LocalStepsState:
        state = inner.init(params)
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *jnp.shape(x))), state)
        return LocalStepsState(outer.init(params), copies)

    def update(updates: Params, state: LocalStepsState, params: Params | None = None):
        updates, after = outer.update(updates, state.outer, params)
        return updates, LocalStepsState(after, state.inner)

    return WithLocalSteps(init, update, inner)
