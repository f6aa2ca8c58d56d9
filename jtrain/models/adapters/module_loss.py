"""Losses of an nnx module itself: `loss(module, batch, rng)`."""

from collections.abc import Callable
from typing import Any

from jtrain.core.loss import Stateful
from jtrain.core.rows import row_keys
from jtrain.core.types import Batch, Extra, Key, Metrics, Params
from jtrain.errors.user_code import check_takes
from jtrain.models.adapters.library_modules import stateful_output
from jtrain.models.adapters.nnx import SplitModule


def module_loss(loss: Callable[..., Any], module: SplitModule) -> Stateful:
    """Return a loss of (module, batch, rng) as a loss of the module's arrays.

    With a key the module is in training mode, with its random streams filled from the keys of the
    rows. The layers' state (running statistics) is carried on.

    Raises:
        LossError: if `loss` does not take these arguments.
    """
    check_takes(loss, ("module", "batch", "rng"), "the loss of an nnx module")

    def call(
        params: Params, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[Any, Metrics, Extra]:
        keys = row_keys(rng, batch)
        inner = module.module(params, extra, keys, rng is not None)
        result = loss(inner, batch, rng)
        pair = type(result) is tuple and len(result) == 2
        value, metrics = result if pair else (result, {})
        return value, metrics, stateful_output(extra, module.extra_of(inner), batch["mask"])

    return Stateful(call)
