"""How a function that is not ours is told whether it trains."""

import inspect
from collections.abc import Callable
from typing import Any

from jtrain.errors import LossError

TRAINS = ("train", "training", "is_training")
RESTS = ("deterministic", "inference", "use_running_average")


def switch_of(call: Callable[..., Any], what: str) -> Callable[[bool], dict[str, Any]]:
    """`train -> arguments`: what `call` is given by keyword, by the names that it takes.

    True while training for `train`, `training` and `is_training`; False for `deterministic`,
    `inference` and `use_running_average`. Nothing for a function that takes none of them: it does
    the same in both.

    Raises:
        LossError: if it takes anything at all by keyword, so that no name can be found.
    """
    taken = inspect.signature(call).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        raise LossError(
            f"{what} was to say by its arguments how it is told that it trains, and it takes "
            f"`**{list(taken)[-1]}`. Write the one it needs by name: `{TRAINS[0]}` or `{RESTS[0]}`."
        )
    on, off = [n for n in TRAINS if n in taken], [n for n in RESTS if n in taken]
    return lambda train: dict.fromkeys(on, train) | dict.fromkeys(off, not train)
