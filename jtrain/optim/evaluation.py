"""Optimizers that judge a model by other parameters than those that they train."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import optax

from jtrain.core.types import Params

EvalParams: TypeAlias = Callable[[Any, Params], Params]  # (the optimizer's state, params) -> params


class WithEvalParams(optax.GradientTransformationExtraArgs):
    """A transformation with `eval_params(opt_state, params)`: what to evaluate and sample with.

    It is pure and runs where the state lives. `optax.chain` drops it: chain first, then wrap.
    """

    eval_params: EvalParams

    def __new__(cls, init: Any, update: Any, eval_params: EvalParams) -> "WithEvalParams":
        """The transformation of `init` and `update`, and the function beside them."""
        self = super().__new__(cls, init, update)
        self.eval_params = eval_params
        return self


@runtime_checkable
class OptimizedState(Protocol):
    """What a training state has, among other things."""

    @property
    def params(self) -> Params:
        """The trained parameters."""
        ...

    @property
    def opt_state(self) -> Any:
        """What the optimizer keeps."""
        ...


def evaluation_params(optimizer: optax.GradientTransformation, state: OptimizedState) -> Params:
    """The parameters that a state is judged by: the optimizer's, or the trained ones themselves."""
    if isinstance(optimizer, WithEvalParams):
        return optimizer.eval_params(state.opt_state, state.params)
    return state.params


def chain_before(
    before: optax.GradientTransformation, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`before`, then `optimizer`, with the evaluation parameters of the second."""
    whole = optax.chain(before, optimizer)
    if not isinstance(optimizer, WithEvalParams):
        return whole
    return WithEvalParams(*whole, lambda state, params: optimizer.eval_params(state[-1], params))
