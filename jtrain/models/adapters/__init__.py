"""Any kind of model as a `Model`: advice for other libraries, functions, modules' arguments."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jtrain.core.mean import Mean
from jtrain.core.model import Model, is_training
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Extra, Key, Keys, Leaf, Params
from jtrain.errors import LossError
from jtrain.parallel.explicit import replicated

# A Model, an nnx module, or a function of (params, *inputs) that does the same in training.
AnyModel: TypeAlias = Any
LIBRARIES = {
    "equinox": "pass jt.models.from_equinox(lambda key: Net(key))",
    "flax": "pass jt.models.from_linen(module, x[:1])",
    "haiku": "pass jt.models.from_haiku(transformed, x[:1])",
    "torch": "JAX cannot differentiate torch's parameters: write the model with flax.nnx, "
    "and load its weights from model.state_dict(), or by jt.models.params_from_timm",
    "keras": "Keras' layers hold their own weights: write the model with flax.nnx",
    "tensorflow": "JAX cannot differentiate TensorFlow's variables: write the model with flax.nnx",
}


def as_model(model: AnyModel) -> Model:
    """Return a model of any kind as a `Model`.

    Raises:
        LossError: if `model` is none, or of a library whose models need an adapter.
    """
    if isinstance(model, Model):
        return model
    if is_nnx(model):
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s

        return from_nnx(model)
    check_model_type(model)
    if callable(model):
        return from_function(_no_init, model)._replace(rows_interact="never")
    built = "values of a model: write .build() behind them." if hasattr(model, "build") else ""
    raise LossError(
        f"a model is an nnx module, a jt.Model or a function of (params, *inputs), and this is a "
        f"{type(model).__name__}{', ' + built if built else '. Write it with flax.nnx.'}"
    )


def is_nnx(x: Any) -> bool:
    """Return whether `x` is a module of flax nnx; imports no flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def check_model_type(model: Any) -> None:
    """Raise for a model of another library, which jtrain cannot take unchanged.

    Raises:
        LossError: with the adapter for that library.
    """
    kind = model if isinstance(model, type) else type(model)
    roots = [cls.__module__.partition(".")[0] for cls in kind.__mro__]
    library = next((root for root in roots if root in LIBRARIES), None)
    is_called = any("__call__" in vars(cls) for cls in kind.__mro__[:-1])
    if library is None or is_nnx(model) or not is_called:
        return
    if isinstance(model, type):
        raise LossError(
            f"{model.__name__} is a class, and jtrain takes a model. Make an instance: "
            f"{model.__name__}(rngs=nnx.Rngs(0))."
        )
    raise LossError(f"{kind.__name__} is a model of {library}: {LIBRARIES[library]}.")


def _no_init(key: Any) -> Any:
    """Raise: a function has no parameters of its own."""
    del key
    raise LossError(
        "a model that is a function has no parameters of its own. Pass the initial parameters: "
        "jt.fit(jt.classifier(function), params, data)."
    )


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

    def call(params: Params, extra: Extra, inputs: Any, rng: Any, train: bool, **of_batch: Any):
        options = {"extra": extra, "rng": rng, "train": train}
        result = apply(params, *inputs, **{name: options[name] for name in names}, **of_batch)
        return _pair(result, "apply", "outputs") if stateful else (result, extra)

    named = tuple(name for name in OF_BATCH if name in taken)
    return Model(start, make_apply(call), named=named)


def make_apply(call: Callable[..., tuple[Any, Extra]]) -> Callable[..., tuple[Any, Extra]]:
    """Return `call(params, extra, inputs, rng, train, ...)` as the `apply` of a `Model`."""

    def apply(
        params: Params,
        extra: Extra,
        *inputs: Any,
        rng: Keys | None = None,
        train: bool | None = None,
        **named: Any,
    ) -> tuple[Any, Extra]:
        return call(params, extra, inputs, rng, is_training(rng, train, inputs), **named)

    return apply


def _pair(result: Any, function: str, first: str) -> tuple[Any, Extra]:
    if type(result) is not tuple or len(result) != 2:
        raise LossError(
            f"`apply` takes `extra`, so {function} must return ({first}, extra), and returned a "
            f"{type(result).__name__}. Return both, or take `extra` out of its arguments."
        )
    return result


TRAINS = ("train", "training", "is_training")
EVALUATES = ("deterministic", "inference", "use_running_average")
OF_BATCH = ("mask", "segments")  # arrays of a batch that a module may take by name


def keys_argument(call: Callable[..., Any], rng: Keys | None) -> dict[str, Keys]:
    """Return the keyword argument `keys`, where `call` takes it and `rng` is the keys of rows."""
    if rng is None or rng.ndim == 0 or "keys" not in inspect.signature(call).parameters:
        return {}
    return {"keys": rng}


def make_switch(call: Callable[..., Any], what: str) -> Callable[[bool], dict[str, Any]]:
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


def mean_of_slices(old: Extra, new: Extra, mask: Bool[Array, "b"]) -> Extra:
    """Return `new` as a stateful loss does: a Mean where a leaf is not that of `old`.

    A batch norm of another library returns its next running statistics, and no sums over rows. With
    `rows_interact="batch"` its rows are all rows, and `new` is returned bit for bit. With "slice"
    the state becomes the mean over the slices, each weighted by its share of real rows (`mask`);
    a slice without real rows counts for nothing. The variance between slices is in
    no slice's variance, so the result is smaller than the variance of the whole batch. Integers,
    such as counters, are not weighted.
    """
    real = jnp.mean(mask, dtype=jnp.float32)  # exactly 1 where every row is

    def leaf(before: Leaf, after: Leaf) -> Any:
        if after is before:
            return before
        inexact = jnp.issubdtype(after.dtype, jnp.inexact)
        weight = real if inexact else (real > 0).astype(jnp.float32)
        wide = at_least_f32(after) if inexact else after.astype(jnp.float32)
        return Mean(jnp.where(real > 0, wide * weight, 0), weight)

    return jax.tree.map(leaf, old, new)


def stateful_output(old: Extra, new: Extra, mask: Bool[Array, "b"]) -> Extra:
    """Return `new` as a stateful loss does, for layers of any library.

    Layers of this package return Means already; the others are handled by `mean_of_slices`.
    """
    if not jax.tree.leaves(old):
        return old
    leaf = lambda before, after: (
        after if isinstance(after, Mean) else mean_of_slices(before, after, mask)
    )
    return jax.tree.map(leaf, old, new)


def first_key(rng: Keys) -> Key:
    """Return `rng`, or the first of the keys of rows, for layers that draw once for all rows."""
    return rng if rng.ndim == 0 else replicated(rng)[0]
