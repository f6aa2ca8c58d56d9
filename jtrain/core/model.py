"""A model of any framework as two pure functions over plain arrays."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jtrain.core.types import Couples, Dims, Extra, Key, Params


class Model(NamedTuple):
    """A model of any framework as two pure functions over plain arrays."""

    init: Callable[[Key], tuple[Params, Extra]]
    apply: Callable[..., tuple[Any, Extra]]  # (params, extra, rng, train, *inputs)
    # By parameter, `blocks/0/up/kernel`, if it says.
    dims: Mapping[str, Dims] = MappingProxyType({})
    # What `apply` also takes by name: of `keys` (of the rows), `mask` and the switches of training.
    named: tuple[str, ...] = ()
    # What its layers do to the rows of a batch while it trains; None: not known.
    couples: Couples | None = None

    def __hash__(self) -> int:  # a program is compiled for a model
        return hash((self.init, self.apply))
