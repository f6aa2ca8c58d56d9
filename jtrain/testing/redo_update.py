"""The update of an optimizer for a known gradient, on one device."""

from typing import Any

import jax
import optax

from jtrain.testing.case import LossCase
from jtrain.testing.result import StepResult


def redo_update(case: LossCase, actual: StepResult, expected: StepResult) -> StepResult | None:
    """Return `expected` with the state after an update by the gradient of `actual`.

    Adam, and even more so sign-based optimizers, turn the rounding of a nearly zero gradient (the
    bias of attention keys) into a full step. A difference that remains after this replacement is
    not caused by rounding of the gradient. The result is None if the optimizer needs the loss.
    """

    def update(gradient: Any) -> Any:
        params, optimizer = case.params, optax.with_extra_args_support(case.optimizer)
        updates, state = optimizer.update(gradient, optimizer.init(params), params)
        return {"params": optax.apply_updates(params, updates), "opt_state": state}

    try:
        trees = jax.device_get(jax.jit(update)(actual.gradient))
    except TypeError:  # a line search needs the loss function
        return None
    return expected._replace(state={**expected.state, **trees})
