"""Arguments by which functions of other libraries are switched between training and evaluation."""

import inspect
from collections.abc import Callable
from typing import Any

from jtrain.core.types import Keys
from jtrain.errors import LossError

TRAINS = ("train", "training", "is_training")
EVALUATES = ("deterministic", "inference", "use_running_average")


def keys_argument(call: Callable[..., Any], rng: Keys | None) -> dict[str, Keys]:
    """Return the keyword argument `keys`, where `call` takes it and `rng` is the keys of rows."""
    if rng is None or rng.ndim == 0 or "keys" not in inspect.signature(call).parameters:
        return {}
    return {"keys": rng}


def switch_of(call: Callable[..., Any], what: str) -> Callable[[bool], dict[str, Any]]:
    """Return `train -> keyword arguments` for the switches that `call` takes.

    In training `train`, `training` and `is_training` are True, and `deterministic`, `inference` and
    `use_running_average` False. A function that takes none of them gets no argument.

    Raises:
        LossError: if `call` takes `**keywords`, which hides its switches.
    """
    taken = inspect.signature(call).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        raise LossError(
            f"{what} must name its switch of training, and takes "
            f"`**{list(taken)[-1]}`. Write the switch by name: `{TRAINS[0]}` or `{EVALUATES[0]}`."
        )
    on, off = [n for n in TRAINS if n in taken], [n for n in EVALUATES if n in taken]
    return lambda train: dict.fromkeys(on, train) | dict.fromkeys(off, not train)
