"""A loss of an nnx module itself: `loss(module, batch, rng)`."""

from collections.abc import Callable
from typing import Any

from jtrain.core.loss import Stateful
from jtrain.core.rows import row_keys
from jtrain.core.types import Batch, Extra, Key, Metrics, Params
from jtrain.errors.user_code import check_takes
from jtrain.models.adapters.nnx import SplitModule
from jtrain.models.adapters.statistics import carried


def module_loss(loss: Callable[..., Any], module: SplitModule) -> Stateful:
    """Return a loss of (module, batch, rng) as one of the module's arrays.

    The loss gets the module switched to training where there is a key, its random streams filled
    from the keys of the rows; what its layers carry (running statistics) is handed on.

    Raises:
        LossError: if `loss` cannot be called so.
    """
    check_takes(loss, ("module", "batch", "rng"), "the loss of an nnx module")

    def call(
        params: Params, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[Any, Metrics, Extra]:
        keys = None if rng is None else row_keys(rng, batch)
        inner = module.module(params, extra, keys, rng is not None)
        got = loss(inner, batch, rng)
        value, metrics = got if type(got) is tuple and len(got) == 2 else (got, {})
        return value, metrics, carried(extra, module.extra_of(inner), batch["mask"])

    return Stateful(call)
