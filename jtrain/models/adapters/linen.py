"""Any flax linen module as two pure functions over plain dicts of arrays."""

import inspect
from collections.abc import Sequence
from typing import Any

import flax.core.meta
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from jtrain.core.model import Model, is_training
from jtrain.core.rows import first_key
from jtrain.core.types import Extra, Key, Keys, Leaf, Params
from jtrain.errors import LossError
from jtrain.models.adapters.library_modules import OF_BATCH, keys_argument, make_switch


def from_linen(module: nn.Module, *inputs: Leaf, streams: Sequence[str] = ("dropout",)) -> Model:
    """Return a linen module as `Model(init, apply)`; `inputs` are example arrays or shapes.

    `params` is the collection of that name and `extra` holds the others (`batch_stats`), as plain
    nested dicts. `apply(params, extra, *inputs, rng=None, train=None)` passes `train` to the module
    by the argument that the module has for it (`train`, `deterministic`, ...; see
    `models.adapters.switch`), draws stream i of `streams` from `fold_in(rng, i)` and returns the
    outputs and the new `extra`.

    `rng` is a key, or the keys of the rows (`jtrain.row_keys`), of which the first is used: a flax
    layer draws one mask for all rows of a call.

    `BatchNorm` couples rows: declare `couples="batch"`, and pass it the batch's mask
    (`nn.BatchNorm(...)(x, mask=mask)`, the mask among the inputs) where batches may be ragged.

    Raises:
        LossError: if the module takes `**keywords`; from `apply`, if it draws in training and `rng`
            is None.
    """
    switch = make_switch(module.__call__, f"the linen module {type(module).__name__}")
    taken = inspect.signature(module.__call__).parameters
    named = tuple(name for name in OF_BATCH if name in taken)

    def init(key: Key) -> tuple[Params, Extra]:
        like = [jnp.zeros(x.shape, x.dtype) for x in inputs]
        rngs = _rngs(("params", *streams), key)
        variables = flax.core.meta.unbox(module.init(rngs, *like, **switch(False)))
        return variables.pop("params", {}), variables

    def apply(
        params: Params,
        extra: Extra,
        *inputs: Any,
        rng: Keys | None = None,
        train: bool | None = None,
        **named: Any,
    ):
        train = is_training(rng, train, inputs)
        rngs = {} if rng is None or not train else _rngs(streams, first_key(rng))
        try:
            outputs, changed = module.apply(
                {"params": params, **extra},
                *inputs,
                **named,
                **keys_argument(module.__call__, rng),
                **switch(train),
                rngs=rngs,
                mutable=list(extra) if train else [],
            )
        except flax.errors.InvalidRngError as error:
            raise _rng_error(error, streams, rng) from None
        return outputs, {**extra, **changed}

    return Model(init, apply, named=named)


def _rngs(streams: Sequence[str], key: Key) -> dict[str, Key]:
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(streams)}


def _rng_error(error: Exception, streams: Sequence[str], rng: Keys | None) -> LossError:
    if rng is None:
        return LossError(
            "this model draws random numbers in training, and `apply` got rng=None. Pass the "
            "loss's `rng`, or train=False."
        )
    return LossError(
        f"this model has the streams {', '.join(streams) or 'none'}, and draws from another "
        f"({str(error).split(' (')[0]}). Name all streams: from_linen(..., "
        f'streams=("dropout", "noise")).'
    )
