"""Freezing: an optimizer for some of the leaves, and a loss differentiated by these alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.loss import Stateful
from jtrain.core.types import LossFn, Params
from jtrain.optim.evaluation import WithEvalParams


def freeze_others(
    optimizer: optax.GradientTransformation, trained: Callable[[Params], Any]
) -> optax.GradientTransformation:
    """Return `optimizer` for the leaves that `trained` marks True, without state for the others.

    Like `optax.masked`, but the extra arguments are masked too: `grad`, and `value_fn` and
    `grad_fn`, which become functions of the trained leaves.
    """
    named = with_named_arguments(optimizer)
    masked = optax.masked(named, trained, mask_compatible_extra_args=True)

    def mask(tree: Params) -> Params:
        keep = lambda kept, leaf: leaf if kept else optax.MaskedNode()
        return jax.tree.map(keep, trained(tree), tree)

    def update(updates: Params, state: Any, params: Params | None = None, **extra: Any):
        value_fn = extra.get("value_fn")
        if value_fn is not None:

            @functools.wraps(value_fn)  # optax reads which of the other arguments it takes
            def of_trained(some: Params, **known: Any) -> Any:
                return value_fn(_fill_masked(some, params), **known)

            extra["value_fn"] = of_trained
        if (grad_fn := extra.get("grad_fn")) is not None:
            extra["grad_fn"] = lambda some, *index: mask(grad_fn(_fill_masked(some, params)))
        return masked.update(updates, state, params, **extra)

    def eval_params(state: Any, params: Params) -> Params:
        assert isinstance(optimizer, WithEvalParams)
        return _fill_masked(optimizer.eval_params(state.inner_state, mask(params)), params)

    if isinstance(optimizer, WithEvalParams):
        return WithEvalParams(masked.init, update, eval_params)
    return optax.GradientTransformationExtraArgs(masked.init, update)


def differentiate_only(
    loss: LossFn | Stateful, trained: Callable[[Params], Any]
) -> LossFn | Stateful:
    """Return `loss`, whose gradient is zero for the leaves that `trained` marks False.

    No backward pass is computed for what depends on these leaves alone.
    """
    function: Any = loss.loss if isinstance(loss, Stateful) else loss

    @functools.wraps(function)
    def call(params: Params, *rest: Any) -> Any:
        stop = lambda keep, leaf: leaf if keep else jax.lax.stop_gradient(leaf)
        return function(jax.tree.map(stop, trained(params), params), *rest)

    return Stateful(call) if isinstance(loss, Stateful) else call


def _fill_masked(some: Params, params: Params) -> Params:
    """Return `some` with the leaves of `params` where `some` is masked."""
    masked = lambda x: isinstance(x, optax.MaskedNode)
    return jax.tree.map(lambda a, b: b if masked(a) else a, some, params, is_leaf=masked)
