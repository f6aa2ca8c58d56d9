"""An optimizer for a part of the leaves."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jtrain.core.types import Params
from jtrain.optim.evaluation import WithEvalParams


def freeze_others(
    optimizer: optax.GradientTransformation, trained: Callable[[Params], Any]
) -> optax.GradientTransformation:
    """`optimizer` for the leaves that `trained` marks True; of the others it keeps no state.

    As `optax.masked`, and what it gets with the gradient is masked too: `grad`, and `value_fn`,
    which becomes a function of the trained leaves.
    """
    masked = optax.masked(optimizer, trained, mask_compatible_extra_args=True)

    def update(updates: Params, state: Any, params: Params | None = None, **known: Any):
        whole = known.get("value_fn")
        if whole is not None:
            known["value_fn"] = lambda some: whole(_filled(some, params))
        return masked.update(updates, state, params, **known)

    def eval_params(state: Any, params: Params) -> Params:
        assert isinstance(optimizer, WithEvalParams)
        some = jax.tree.map(
            lambda keep, leaf: leaf if keep else optax.MaskedNode(), trained(params), params
        )
        return _filled(optimizer.eval_params(state.inner_state, some), params)

    if isinstance(optimizer, WithEvalParams):
        return WithEvalParams(masked.init, update, eval_params)
    return optax.GradientTransformationExtraArgs(masked.init, update)


def _filled(some: Params, whole: Params) -> Params:
    """`some`, with the leaves of `whole` where it has none."""
    masked = lambda x: isinstance(x, optax.MaskedNode)
    return jax.tree.map(lambda a, b: b if masked(a) else a, some, whole, is_leaf=masked)
