"""Running averages of the parameters, for evaluation."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Leaf, Params
from jtrain.optim.evaluation import WithEvalParams


class AverageState(NamedTuple):
    """The state of `with_average` beside the optimizer's own."""

    count: Leaf  # int32 scalar: updates
    average: Params  # of the shapes of the parameters, in at least float32


def with_average(optimizer: optax.GradientTransformation, decay: float) -> WithEvalParams:
    """Return `optimizer`, evaluated on the weighted mean of the parameters after each update.

    The weight of an update's parameters falls by `decay` at each later update, and the weights add
    up to 1 from the first: no trace of the initial parameters is left, and no bias to correct.
    """
    chained = optax.chain(optimizer, _average_params(decay))

    def eval_params(state: Any, params: Params) -> Params:
        count, average = state[-1]
        return jax.tree.map(
            lambda a, p: jnp.where(count > 0, a.astype(p.dtype), p), average, params
        )

    return WithEvalParams(*chained, eval_params)


def _average_params(decay: float) -> optax.GradientTransformation:
    """Return a transformation that leaves updates unchanged and averages the new parameters."""

    def init(params: Params) -> AverageState:
        return AverageState(jnp.int32(0), at_least_f32(jax.tree.map(jnp.zeros_like, params)))

    def update(updates: Params, state: Any, params: Params | None = None):
        assert params is not None, "without parameters the optimizer before the average raises"
        count = state.count + 1
        # (1 - decay) / (1 - decay^count) makes the weights add up to 1. By expm1, as 1 - 0.9999^1
        # in float32 has a relative error of 1e-4.
        share = (1 - decay) / -jnp.expm1(count * math.log(decay))
        new = at_least_f32(optax.apply_updates(params, updates))
        average = jax.tree.map(lambda a, p: a + share * (p - a), state.average, new)
        return updates, AverageState(count, average)

    return optax.GradientTransformation(init, update)
