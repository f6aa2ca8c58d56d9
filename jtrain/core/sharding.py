"""Gradient sharding: where a step puts trees of the structure of the parameters."""

from collections.abc import Callable
from typing import NamedTuple

from jtrain.core.types import Params


class GradientSharding(NamedTuple):
    """Where a step puts trees of the structure of the parameters, each function giving its own."""

    params: Callable[[Params], Params]  # the copy of them that is computed with
    each: Callable[[Params], Params]  # the gradient of a microbatch
    summed: Callable[[Params], Params]  # that of the batch


NO_SHARDING = GradientSharding(*[lambda tree: tree] * 3)
