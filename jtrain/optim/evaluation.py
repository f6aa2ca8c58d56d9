"""Parameters for evaluation that are not the trained ones: running averages, and other rules."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Leaf, Params

EvalParams: TypeAlias = Callable[[Any, Params], Params]  # (the optimizer's state, params) -> params


class WithEvalParams(optax.GradientTransformationExtraArgs):
    """A transformation with `eval_params(opt_state, params)`, for evaluation and sampling.

    `eval_params` is pure and runs where the state lives. `optax.chain` drops it: chain first, then
    wrap.
    """

    eval_params: EvalParams

    def __new__(cls, init: Any, update: Any, eval_params: EvalParams) -> "WithEvalParams":
        """Make the transformation of `init` and `update` with `eval_params`."""
        self = super().__new__(cls, init, update)
        self.eval_params = eval_params
        return self


def evaluation_params(optimizer: optax.GradientTransformation, state: Any) -> Params:
    """Return the parameters to evaluate: the optimizer's `eval_params`, or the trained ones.

    Args:
        state: has `params` and `opt_state`.
    """
    if isinstance(optimizer, WithEvalParams):
        return optimizer.eval_params(state.opt_state, state.params)
    return state.params


def chain_before(
    before: optax.GradientTransformation, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Chain `before` and `optimizer`, with the evaluation parameters of `optimizer`."""
    chained = optax.chain(before, optimizer)
    if not isinstance(optimizer, WithEvalParams):
        return chained
    return WithEvalParams(*chained, lambda state, params: optimizer.eval_params(state[-1], params))


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
