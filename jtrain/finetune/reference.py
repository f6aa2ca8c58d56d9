"""Losses that compare the parameters with those from before the first step."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jtrain.core.loss import Stateful
from jtrain.core.types import Batch, Extra, Key, LossValue, Metrics, Params

REFERENCE = "reference"
Output = tuple[LossValue, Metrics, Extra]


@dataclasses.dataclass(frozen=True)
class ReferenceLoss(Stateful):
    """A loss with state, which has the parameters from before the first step in its `extra`.

    Under LoRA the copy is one of the terms, and the frozen weights are shared.
    """

    compare: Callable[[Params, Params, Extra, Batch, Key | None], Output]
    """The loss as a function of `(params, reference, extra, batch, rng)`."""


def reference_loss(
    compare: Callable[[Params, Params, Extra, Batch, Key | None], Output],
) -> ReferenceLoss:
    """Return the loss of `(params, reference, extra, batch, rng)`, whose `extra` is a dict.

    The `extra` of the run has the copy that `copy_reference` makes as `extra["reference"]`.
    """

    def loss(params: Params, extra: Extra, batch: Batch, rng: Key | None) -> Output:
        return compare(params, read_reference(params, extra), extra, batch, rng)

    return ReferenceLoss(loss, compare)


def copy_reference(params: Params) -> dict[str, Params]:
    """Return the part of `extra` that has a copy of the parameters."""
    return {REFERENCE: jax.tree.map(jnp.copy, params)}


def read_reference(params: Params, extra: Extra) -> Params:
    """Return the parameters from before the first step, in the types of `params`."""
    return jax.tree.map(lambda old, new: old.astype(new.dtype), extra[REFERENCE], params)
