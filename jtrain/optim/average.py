"""A running average of the parameters, to judge by."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Leaf, Params
from jtrain.optim.evaluation import WithEvalParams


class AverageState(NamedTuple):
    """What `with_average` keeps beside the optimizer's own state."""

    count: Leaf  # int32 scalar: updates
    average: Params  # of the shapes of the parameters, in at least float32


def with_average(optimizer: optax.GradientTransformation, decay: float) -> WithEvalParams:
    """`optimizer`, judged by the weighted mean of the parameters after each of its updates.

    The weight of an update's parameters falls by `decay` at each later update, and the weights add
    up to 1 from the first: no trace of the initial parameters is left, and no bias to correct.
    """
    whole = optax.chain(optimizer, _keep_average(decay))

    def eval_params(state: Any, params: Params) -> Params:
        count, average = state[-1]
        return jax.tree.map(
            lambda a, p: jnp.where(count > 0, a.astype(p.dtype), p), average, params
        )

    return WithEvalParams(*whole, eval_params)


def _keep_average(decay: float) -> optax.GradientTransformation:
    """Updates as they are; keeps the average of the parameters after them."""

    def init(params: Params) -> AverageState:
        return AverageState(jnp.int32(0), at_least_f32(jax.tree.map(jnp.zeros_like, params)))

    def update(updates: Params, state: Any, params: Params | None = None):
        assert params is not None, "without parameters the optimizer before this one has raised"
        count = state.count + 1
        # (1 - decay) / (1 - decay^count): what makes the weights add up to 1. By expm1, as
        # 1 - 0.9999^1 in float32 is off by 1e-4 of itself.
        share = (1 - decay) / -jnp.expm1(count * math.log(decay))
        new = at_least_f32(optax.apply_updates(params, updates))
        average = jax.tree.map(lambda a, p: a + share * (p - a), state.average, new)
        return updates, AverageState(count, average)

    return optax.GradientTransformation(init, update)
