"""Functions of an experiment with an adapter in the place of the model's parameters."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from jtrain.core.loss import Stateful
from jtrain.core.model import Model
from jtrain.core.types import Batch, Extra, Key, LossFn, LossValue, Metrics, Params
from jtrain.finetune.lora import LowRankAdapter, Weights
from jtrain.finetune.reference import ReferenceLoss, read_reference

T = TypeVar("T")
InitExtra: TypeAlias = Callable[[Params, Extra, int], Extra]


def adapted_loss(adapter: LowRankAdapter, loss: LossFn | Stateful) -> Stateful:
    """Return the loss of the terms; the frozen weights are carried and stay as they are."""

    def call(
        params: Params, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[LossValue, Metrics, Extra]:
        full, rest = adapter.join(params, extra, adapter.row_keys(rng, batch)), extra["rest"]
        if isinstance(loss, ReferenceLoss):
            reference = adapter.join(read_reference(params, rest), extra)
            value, metrics, rest = loss.compare(full, reference, rest, batch, rng)
        elif isinstance(loss, Stateful):
            value, metrics, rest = loss.loss(full, rest, batch, rng)
        else:
            output: Any = loss(full, batch, rng)
            value, metrics = output if type(output) is tuple else (output, {})
        return value, metrics, {"base": extra["base"], "rest": rest}

    return Stateful(call)


def adapted_init_extra(init_extra: InitExtra | None) -> InitExtra | None:
    """Return the function that makes the state of the loss, where there is one, of the terms."""
    if init_extra is None:
        return None
    return lambda params, extra, rows: {
        "base": extra["base"],
        "rest": init_extra(params, extra["rest"], rows),
    }


def adapted(adapter: LowRankAdapter, call: Callable[..., T] | None) -> Callable[..., T] | None:
    """Return a function of `(params, extra, ...)`, where there is one, with the terms merged."""
    if call is None:
        return None
    return lambda params, extra, *rest: call(
        adapter.join(params, extra, merged=True), extra["rest"], *rest
    )


def adapted_model(adapter: LowRankAdapter, model: Model) -> Model:
    """Return the model as a function of the terms and of what is carried beside them."""

    def init(key: Key) -> Weights:
        return adapter.attach(model.init(key), key)

    def apply(params: Params, extra: Extra, *inputs: Any, **named: Any) -> tuple[Any, Extra]:
        full = adapter.join(params, extra, merged=True)
        outputs, rest = model.apply(full, extra["rest"], *inputs, **named)
        return outputs, {"base": extra["base"], "rest": rest}

    return Model(init, apply, adapter.dims(model.dims), model.named, model.couples)
