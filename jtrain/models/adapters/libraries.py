"""Models of linen, haiku and equinox as two pure functions over plain dicts of arrays."""

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import flax.core.meta
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jtrain.core.model import Model
from jtrain.core.pytree import name
from jtrain.core.rows import check_no_hidden_rows, threefry
from jtrain.core.types import Extra, Key, Keys, Leaf, Params
from jtrain.errors import ConfigError, LossError
from jtrain.errors.advice import CARRY_EXTRA
from jtrain.models.adapters import OF_BATCH, first_key, keys_argument, make_apply, make_switch
from jtrain.models.adapters.cpu_pools import fast_pools


def from_linen(module: nn.Module, *inputs: Leaf, streams: Sequence[str] = ("dropout",)) -> Model:
    """Return a linen module as `Model(init, apply)`; `inputs` are example arrays or shapes.

    `params` is the collection of that name and `extra` holds the others (`batch_stats`), as plain
    nested dicts. `apply(params, extra, *inputs, rng=None, train=None)` passes `train` to the module
    by the argument that the module has for it (`train`, `deterministic`, ...), draws stream i of
    `streams` from `fold_in(rng, i)` and returns the outputs and the new `extra`.

    `rng` is a key, or the keys of the rows (`jtrain.row_keys`), of which the first is used: a flax
    layer draws one mask for all rows of a call.

    `BatchNorm` couples rows: declare `rows_interact="batch"`, and pass it the batch's mask
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

    def call(params: Params, extra: Extra, inputs: Any, rng: Any, train: bool, **named: Any):
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

    return Model(init, fast_pools(make_apply(call)), named=named)


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


Transformed: TypeAlias = Any  # hk.Transformed or hk.TransformedWithState; haiku is not a dependency


def from_haiku(transformed: Transformed, *inputs: Leaf) -> Model:
    """Return `hk.transform(f)` or `hk.transform_with_state(f)` as `Model(init, apply)`.

    `inputs` are arrays or shapes like those that `f` takes. `params` and `extra` (haiku's state)
    are haiku's own dicts of dicts. `apply(params, extra, *inputs, rng=None, train=None)` passes
    `train` to `f` by the argument that `f` has for it (`train`, `is_training`, ...).

    `rng` is a key, or the keys of the rows (`jtrain.row_keys`), of which the first is used:
    `hk.dropout` draws one mask for all rows of a call.

    With `hk.BatchNorm`, declare `rows_interact="batch"`. It takes no mask, so a function with state
    trains on full batches only.

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
    hk = _library("haiku", "dm-haiku")
    if isinstance(transformed, hk.Transformed):
        transformed = hk.with_empty_state(transformed)
    switch = make_switch(transformed.apply, "the haiku function")

    def init(key: Key) -> tuple[Params, Extra]:
        like = [jnp.zeros(x.shape, x.dtype) for x in inputs]
        # Called in training mode: only then does hk.BatchNorm make the state of its statistics.
        params, state = transformed.init(key, *like, **switch(True))
        return dict(params), dict(state)

    def call(params: Params, extra: Extra, inputs: Any, rng: Any, train: bool):
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

    return Model(init, fast_pools(make_apply(call)))


EquinoxModule: TypeAlias = Any  # eqx.Module; equinox is not a dependency


def from_equinox(make: Callable[[Key], EquinoxModule | tuple[EquinoxModule, Any]]) -> Model:
    """Return the module that `make(key)` builds as `Model(init, apply)`.

    A module with state is made by `eqx.nn.make_with_state(Net)`. `params` (every array of floats)
    and `extra` (`buffers`, which are all other arrays, and `state`) are plain nested dicts; static
    fields are closed over. No array is made here.

    The module is written for one row, as equinox modules are: `module(*inputs)`, after the inputs
    the state if the module has one, and `key=` if it takes a key. `apply(params, extra, *inputs,
    rng=None, train=None)` maps it over the rows of the inputs and returns the outputs and the new
    `extra`. In evaluation the module is in inference mode.

    `rng` are the keys of the rows (`jtrain.row_keys`): the dropout of a row then depends on no
    device and no microbatch. A single key is folded with the index of the row.

    With `eqx.nn.BatchNorm`, declare `rows_interact="batch"`. It takes no mask, so it trains on full
    batches only.

    Raises:
        ConfigError: if equinox is not installed.
        LossError: if batch norms name several axes; from `apply`, if the module draws while
            training and `rng` is None, or has a batch norm and trains where rows may be hidden.
    """
    eqx = _library("equinox", "equinox")
    built = eqx.filter_eval_shape(make, jax.random.key(0))
    with_state = isinstance(built, tuple)
    module, state = built if with_state else (built, ())
    axis = _row_axis(eqx, module)
    takes_key = "key" in inspect.signature(module.__call__).parameters
    leaves, structure = jax.tree_util.tree_flatten_with_path(module)
    kinds = [_kind(leaf) for _, leaf in leaves]
    paths = [_strings(path) for path, _ in leaves]
    carried = ["buffers"] * ("buffers" in kinds) + ["state"] * bool(jax.tree.leaves(state))
    state_paths = [_strings(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]

    def select(arrays: Sequence[Leaf], kind: str) -> dict[str, Any]:
        chosen = zip(paths, arrays, kinds, strict=True)
        return unflatten_dict({path: array for path, array, own in chosen if own == kind})

    def nest_state(state: Any) -> dict[str, Any]:
        return unflatten_dict(dict(zip(state_paths, jax.tree.leaves(state), strict=True)))

    def init(key: Key) -> tuple[Params, Extra]:
        module, state = make(key) if with_state else (make(key), ())
        arrays = jax.tree.leaves(module)
        extra = {"buffers": select(arrays, "buffers"), "state": nest_state(state)}
        return select(arrays, "params"), {name: tree for name, tree in extra.items() if tree}

    def call(params: Params, extra: Extra, inputs: Any, rng: Any, train: bool):
        if train and axis:
            check_no_hidden_rows("a batch norm of equinox")
        if missing := [name for name in carried if name not in extra]:
            raise LossError(
                f"the module carries {' and '.join(missing)} beside its parameters (running "
                f"statistics, say), and `apply` got `extra` without them. {CARRY_EXTRA}"
            )
        trees = {"params": params, **extra}
        arrays = [
            functools.reduce(operator.getitem, path, trees[kind]) if kind else leaf
            for kind, path, (_, leaf) in zip(kinds, paths, leaves, strict=True)
        ]
        net = eqx.nn.inference_mode(jax.tree.unflatten(structure, arrays), not train)
        before = [functools.reduce(operator.getitem, p, extra["state"]) for p in state_paths]

        def call_row(key: Key | None, row: tuple[Any, ...], state: Any) -> Any:
            keyword = {"key": key} if takes_key else {}
            return net(*row, state, **keyword) if with_state else (net(*row, **keyword), ())

        keys = _row_keys(rng, len(inputs[0])) if train and takes_key else None
        over_rows = jax.vmap(call_row, (0, 0, None), (0, None), axis_name=axis or "batch")
        try:
            outputs, after = over_rows(
                keys, inputs, jax.tree.unflatten(jax.tree.structure(state), before)
            )
        except (RuntimeError, ValueError) as error:
            raise _explain(error, axis or "batch") from None
        if not (train and with_state):
            return outputs, extra
        return outputs, {**extra, "state": nest_state(after)}

    return Model(init, fast_pools(make_apply(call)), rows_interact="batch" if axis else "never")


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"from_{name} needs {name}, which is not installed. Type: pip install {package}"
        ) from None


def _row_axis(eqx: Any, module: EquinoxModule) -> str:
    """Return the batch norms' name of the axis of rows; empty without a batch norm."""
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)
    norms = filter(is_norm, jax.tree.leaves(module, is_leaf=is_norm))
    names = sorted({str(norm.axis_name) for norm in norms})
    if len(names) > 1:
        raise LossError(
            f"the rows of a batch are one axis, and the batch norms of this module give it "
            f"several names: {', '.join(names)}. Give them all axis_name={names[0]!r}."
        )
    return names[0] if names else ""


def _kind(leaf: Any) -> str:
    """Return the tree that a leaf of the module goes into; empty unless it is an array."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return ""
    return "params" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "buffers"


def _row_keys(rng: Keys | None, rows: int) -> Any:
    if rng is None or rng.ndim:
        return rng
    return jax.vmap(jax.random.fold_in, (None, 0))(threefry(rng), jnp.arange(rows))


def _explain(error: Exception, axis: str) -> Exception:
    """Return the error of a module over rows, or what to do about it where that is known."""
    if "out_axes is None" in str(error):
        return LossError(
            f"the state of this module differs by row, and a batch has one state for all rows. "
            f"Store its mean over them: jax.lax.pmean(x, {axis!r})."
        )
    if "requires a key" not in str(error):
        return error
    return LossError(
        "this model draws random numbers in training, and got no key. Pass "
        "`jt.row_keys(rng, batch)` as the rng of `apply`, and in the module `key=key` to the "
        "layers that draw; or pass train=False."
    )


def _strings(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(name((entry,)) for entry in path)
