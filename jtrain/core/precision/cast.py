"""Losses that compute in a narrower type than their parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.loss import Stateful
from jtrain.core.types import Leaf, LossFn, Params


def compute_in(
    loss: LossFn | Stateful, dtype: Any, place: Callable[[Params], Params] = lambda params: params
) -> LossFn | Stateful:
    """Return `loss` of the parameters cast to `dtype`, if it is not None, and placed by `place`.

    Gradients come back in the type of the parameters themselves. Neither the batch nor `extra`
    is cast: targets and running statistics keep their digits, and a model casts its inputs to the
    type of its parameters.
    """
    copy = lambda params: place(cast_params(params, dtype))
    if isinstance(loss, Stateful):
        inner = loss.loss
        return Stateful(lambda params, *rest: inner(copy(params), *rest))
    return lambda params, *rest: loss(copy(params), *rest)


def cast_params(params: Params, dtype: Any) -> Params:
    """Return the parameters, floating leaves cast to `dtype` unless it is None."""
    if dtype is None:
        return params

    def leaf(x: Leaf) -> Leaf:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(leaf, params)
