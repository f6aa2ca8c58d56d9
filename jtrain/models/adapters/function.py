"""Plain functions as a Model."""

import inspect
from collections.abc import Callable
from typing import Any

from jtrain.core.model import Model, is_training
from jtrain.core.types import Extra, Key, Keys, Params
from jtrain.errors import LossError
from jtrain.models.adapters.library_modules import OF_BATCH

OPTIONS = ("extra", "rng", "train")


def from_function(init: Callable[[Key], Any], apply: Callable[..., Any]) -> Model:
    """Return two functions of your own as `Model(init, apply)`.

    `init(key)` returns the parameters, any pytree of arrays, and `apply(params, *inputs)` the
    outputs. `apply` also gets those of these arguments that it names: `rng` (a key, the keys of the
    rows, or None), `train` and `extra`; from a loss of a model also the batch's `mask` and
    `segments`. With `extra`, `init(key)` returns `(params, extra)` and `apply` returns
    `(outputs, extra)`.

    Raises:
        LossError: if `apply` takes `**keywords`, which hides the arguments that it needs; if
            `apply` takes `extra`, and `apply` or `init` does not return a pair.
    """
    taken = inspect.signature(apply).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        raise LossError(
            f"from_function passes `apply` those of {', '.join(OPTIONS)} that it names, and "
            f"`apply` takes `**{list(taken)[-1]}`. Name the arguments that `apply` needs."
        )
    names = [name for name in OPTIONS if name in taken]
    stateful = "extra" in names

    def start(key: Key) -> tuple[Params, Extra]:
        return _pair(init(key), "init(key)", "params") if stateful else (init(key), {})

    def call(
        params: Params,
        extra: Extra,
        *inputs: Any,
        rng: Keys | None = None,
        train: bool | None = None,
        **of_batch: Any,
    ):
        options = {"extra": extra, "rng": rng, "train": is_training(rng, train, inputs)}
        result = apply(params, *inputs, **{name: options[name] for name in names}, **of_batch)
        return _pair(result, "apply", "outputs") if stateful else (result, extra)

    return Model(start, call, named=tuple(name for name in OF_BATCH if name in taken))


def _pair(result: Any, function: str, first: str) -> tuple[Any, Extra]:
    if type(result) is not tuple or len(result) != 2:
        raise LossError(
            f"`apply` takes `extra`, so {function} must return ({first}, extra), and returned a "
            f"{type(result).__name__}. Return both, or take `extra` out of its arguments."
        )
    return result
