"""A loss that computes in a narrower type than its parameters are kept in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.loss import Stateful
from jtrain.core.sharding import NO_SHARDING
from jtrain.core.types import Leaf, LossFn, Params


def compute_in(
    loss: LossFn | Stateful, dtype: Any, lay: Callable[[Params], Params] = NO_SHARDING.params
) -> LossFn | Stateful:
    """`loss` of the parameters cast to `dtype`, as they are where that is None, and laid by `lay`.

    Gradients come back in the type that the parameters are kept in. Neither the batch nor `extra`
    is cast: targets and running statistics keep their digits, and a model casts its inputs to the
    type of its parameters.
    """
    copy = lambda params: lay(cast_params(params, dtype))
    if isinstance(loss, Stateful):
        inner = loss.loss
        return Stateful(lambda params, *rest: inner(copy(params), *rest))
    return lambda params, *rest: loss(copy(params), *rest)


def cast_params(params: Params, dtype: Any) -> Params:
    """The parameters, real numbers among them cast to `dtype`; themselves where that is None."""
    if dtype is None:
        return params

    def leaf(x: Leaf) -> Leaf:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(leaf, params)
