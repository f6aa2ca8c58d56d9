"""Any haiku function as two pure functions over plain dicts of arrays."""

from typing import Any, TypeAlias

import jax.numpy as jnp

from jtrain.core.model import Model, is_training
from jtrain.core.rows import check_no_hidden_rows, first_key
from jtrain.core.types import Extra, Key, Keys, Leaf, Params
from jtrain.errors import ConfigError, LossError
from jtrain.models.adapters.library_modules import make_switch

Transformed: TypeAlias = Any  # hk.Transformed or hk.TransformedWithState; haiku is no dependency


def from_haiku(transformed: Transformed, *inputs: Leaf) -> Model:
    """Return `hk.transform(f)` or `hk.transform_with_state(f)` as `Model(init, apply)`.

    `inputs` are arrays or shapes like those that `f` takes. `params` and `extra` (haiku's state)
    are haiku's own dicts of dicts. `apply(params, extra, *inputs, rng=None, train=None)` passes
    `train` to `f` by the argument that `f` has for it (`train`, `is_training`, ...; see
    `jtrain.models.adapters.library_modules`).

    `rng` is a key, or the keys of the rows (`jtrain.row_keys`), of which the first is used:
    `hk.dropout` draws one mask for all rows of a call.

    `hk.BatchNorm` couples rows: declare `couples="batch"`. It takes no mask, so a function with
    state trains on full batches only.

    Raises:
        ConfigError: if haiku is not installed.
        LossError: if `transformed` is neither, or `f` takes `**keywords`; from `apply`, if it draws
            and `rng` is None, or if it has state and trains where rows may be hidden.
    """
    if not (hasattr(transformed, "init") and hasattr(transformed, "apply")):
        raise LossError(
            f"from_haiku takes hk.transform(f) or hk.transform_with_state(f), and got "
            f"{type(transformed).__name__}. Write from_haiku(hk.transform_with_state(f), x)."
        )
    hk = _haiku()
    if isinstance(transformed, hk.Transformed):
        transformed = hk.with_empty_state(transformed)
    switch = make_switch(transformed.apply, "the haiku function")

    def init(key: Key) -> tuple[Params, Extra]:
        like = [jnp.zeros(x.shape, x.dtype) for x in inputs]
        # Called in training mode: only then does hk.BatchNorm make the state of its statistics.
        params, state = transformed.init(key, *like, **switch(True))
        return dict(params), dict(state)

    def apply(
        params: Params,
        extra: Extra,
        *inputs: Any,
        rng: Keys | None = None,
        train: bool | None = None,
    ):
        train = is_training(rng, train, inputs)
        if train and extra:
            check_no_hidden_rows("a haiku function with state")
        key = None if rng is None else first_key(rng)
        try:
            outputs, changed = transformed.apply(params, extra, key, *inputs, **switch(train))
        except ValueError as error:  # haiku's own class for it is private
            if key is not None or "PRNGKey" not in str(error):
                raise
            raise LossError(
                "this model draws random numbers, and `apply` got rng=None. Pass the loss's "
                "`rng`, or draw only where the argument `train` of the function is true."
            ) from None
        return outputs, dict(changed) if train else extra

    return Model(init, apply)


def _haiku() -> Any:
    try:
        import haiku
    except ImportError:
        raise ConfigError(
            "from_haiku needs haiku, which is not installed. Type: pip install dm-haiku"
        ) from None
    return haiku
