"""The state that an optimizer makes of a gradient that is known, on one device."""

from typing import Any

import jax
import optax

from jtrain.testing.case import LossCase
from jtrain.testing.result import StepResult


def remade(of: LossCase, got: StepResult, want: StepResult) -> StepResult | None:
    """`want` with what the optimizer makes of the gradient of `got`; None if that needs more.

    Where a gradient is nearly zero (a key's bias) Adam, and rules of a sign more so, make a full
    step of its rounding. What is left between the two states is no rounding of the gradient.
    """

    def update(gradient: Any) -> Any:
        params, rule = of.params, optax.with_extra_args_support(of.optimizer)
        updates, after = rule.update(gradient, rule.init(params), params)
        return {"params": optax.apply_updates(params, updates), "opt_state": after}

    try:
        made = jax.device_get(jax.jit(update)(got.gradient))
    except TypeError:  # it asks for the loss along a line
        return None
    return want._replace(state={**want.state, **made})
