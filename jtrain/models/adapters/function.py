"""Bare functions as a Model."""

import inspect
from collections.abc import Callable
from typing import Any

from jtrain.core.model import Model
from jtrain.core.types import Extra, Key, Keys, Params
from jtrain.errors import LossError

OFFERED = ("extra", "rng", "train")


def from_function(init: Callable[[Key], Any], apply: Callable[..., Any]) -> Model:
    """Two functions of your own as `Model(init, apply)`.

    `init(key)` gives any pytree of arrays, the parameters. `apply(params, *inputs)` gives the
    outputs; what it has arguments for of these, it gets by keyword: `rng` (a key, the keys of the
    rows, or None), `train`, and `extra`. With `extra`, `init(key)` gives `(params, extra)` and
    `apply` gives `(outputs, extra)`.

    Raises:
        LossError: if `apply` takes `**keywords`, so that it cannot be seen what it needs; if it
            takes `extra`, and it or `init` does not give a pair.
    """
    taken = inspect.signature(apply).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        raise LossError(
            f"from_function gives `apply` what it takes of {', '.join(OFFERED)}, and it takes "
            f"`**{list(taken)[-1]}`. Write by name those that it needs."
        )
    wanted = [name for name in OFFERED if name in taken]
    stateful = "extra" in wanted

    def start(key: Key) -> tuple[Params, Extra]:
        return _pair(init(key), "init(key)", "params") if stateful else (init(key), {})

    def call(params: Params, extra: Extra, rng: Keys | None, train: bool, *inputs: Any):
        offered = {"extra": extra, "rng": rng, "train": train}
        got = apply(params, *inputs, **{name: offered[name] for name in wanted})
        return _pair(got, "apply", "outputs") if stateful else (got, extra)

    return Model(start, call)


def _pair(got: Any, what: str, first: str) -> tuple[Any, Extra]:
    if type(got) is not tuple or len(got) != 2:
        raise LossError(
            f"`apply` takes `extra`, so {what} was to give ({first}, extra), and gave a "
            f"{type(got).__name__}. Return both, or take `extra` out of its arguments."
        )
    return got
