"""A model of any framework as two pure functions over plain arrays."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.core.types import Dims, Extra, Key, Keys, Params, RowsInteract
from jtrain.errors import LossError


class Model(NamedTuple):
    """A model of any framework as two pure functions over plain arrays.

    ```python
    params, extra = model.init(jax.random.key(0))
    outputs, extra = model.apply(params, extra, batch["image"], rng=jt.row_keys(rng, batch))
    ```

    `apply` trains where `rng` is given, and evaluates where it is None; `train=True` or `False`
    says otherwise. `rng` is the keys of the rows (`jtrain.row_keys`) or, for layers that draw once
    for all rows, a key.
    """

    init: Callable[[Key], tuple[Params, Extra]]
    apply: Callable[..., tuple[Any, Extra]]  # (params, extra, *inputs, rng=None, train=None)
    # By parameter, `blocks/0/up/kernel`, if it says.
    dims: Mapping[str, Dims] = MappingProxyType({})
    # What `apply` also takes by name: `mask` (of rows), `segments` (of tokens), training switches.
    named: tuple[str, ...] = ()
    # What its layers do to the rows of a batch while it trains; None: not known.
    rows_interact: RowsInteract | None = None
    # Kernels that may have a low-rank term (jtrain.finetune): whether stored as (outputs, inputs).
    linear: Mapping[str, bool] = MappingProxyType({})

    def __hash__(self) -> int:  # a program is compiled for a model
        return hash((self.init, self.apply))


def is_training(rng: Keys | None, train: bool | None, inputs: Sequence[Any]) -> bool:
    """Return whether `apply` trains: as `train` says, or else if it got a key.

    Raises:
        LossError: if `inputs` begin with a key and a switch, which `apply` takes by name.
    """
    if (
        len(inputs) > 1
        and isinstance(inputs[1], bool)
        and (inputs[0] is None or _is_key(inputs[0]))
    ):
        raise LossError(
            "`apply` takes the inputs after the parameters, and the key by name. Write "
            "model.apply(params, extra, batch[...], rng=jt.row_keys(rng, batch)); it trains where "
            "a key is given, or with train=True."
        )
    return rng is not None if train is None else train


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
