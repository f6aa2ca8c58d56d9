"""Transformations around a rule: clipping by norm, complex leaves, frozen leaves."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.loss import Stateful
from jtrain.core.pytree import norm
from jtrain.core.types import Leaf, LossFn, Params
from jtrain.optim.evaluation import WithEvalParams


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients down to a norm of at most `max_norm` over all leaves.

    A step passes its gradients (`grad`) and their norm, summed over the devices (`grad_norm`). If
    the updates are these gradients, that norm is used. A second sum would be inside the branch that
    applies or skips the step, and on JAX's CPU devices a collective in a branch can wait for one
    outside of it if threads are short (docs/decisions.md).
    """

    def update(
        updates: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        grad: Params | None = None,
        grad_norm: Leaf | None = None,
        **extra: Any,
    ):
        del params, extra
        size = grad_norm if grad_norm is not None and _same(updates, grad) else norm(updates)
        scale = lambda u: jnp.where(size < max_norm, u, u / size.astype(u.dtype) * max_norm)
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _same(updates: Params, grad: Params) -> bool:
    ours, theirs = jax.tree.leaves(updates), jax.tree.leaves(grad)
    return len(ours) == len(theirs) and all(map(lambda a, b: a is b, ours, theirs))


class PartsState(NamedTuple):
    """States of a rule for the real leaves and parts, and for the imaginary parts."""

    real: Any
    imaginary: Any


def by_parts(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `rule` of the real and the imaginary part of each complex leaf, as in PyTorch.

    Parameters without complex leaves have the state and the program of `rule`.
    """
    inner = optax.with_extra_args_support(rule)

    def init(params: Params) -> Any:
        if not _any_complex(params):
            return rule.init(params)
        return PartsState(rule.init(_real(params)), rule.init(_imaginary(params)))

    def update(updates: Params, state: Any, params: Params | None = None, **known: Any):
        if not _any_complex(updates):
            return inner.update(updates, state, params, **known)
        real, first = inner.update(_real(updates), state[0], _real(params), **known)
        imaginary, second = inner.update(_imaginary(updates), state[1], _imaginary(params), **known)
        join = lambda x, y: x if y is None else jax.lax.complex(x, y)
        return jax.tree.map(join, real, imaginary), PartsState(first, second)

    return optax.GradientTransformationExtraArgs(init, update)


def _any_complex(tree: Params) -> bool:
    return any(map(jnp.iscomplexobj, jax.tree.leaves(tree)))


def _real(tree: Params) -> Params:
    return jax.tree.map(jnp.real, tree)


def _imaginary(tree: Params) -> Params:
    return jax.tree.map(lambda x: x.imag if jnp.iscomplexobj(x) else None, tree)


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
    masked = lambda x: isinstance(x, optax.MaskedNode)
    return jax.tree.map(lambda a, b: b if masked(a) else a, some, params, is_leaf=masked)
