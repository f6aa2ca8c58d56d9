"""Optimizers whose evaluation parameters are not the trained parameters."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import optax

from jtrain.core.types import Params

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


@runtime_checkable
class OptimizedState(Protocol):
    """A training state with parameters and an optimizer state."""

    @property
    def params(self) -> Params:
        """The trained parameters."""
        ...

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer."""
        ...


def evaluation_params(optimizer: optax.GradientTransformation, state: OptimizedState) -> Params:
    """Return the parameters to evaluate: the optimizer's `eval_params`, or the trained ones."""
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
