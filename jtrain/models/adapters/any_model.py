"""Conversion of any kind of model to a Model, with advice for models of other libraries."""

import sys
from typing import Any, TypeAlias

from jtrain.core.model import Model
from jtrain.errors import LossError

# A Model, an nnx module, or a function of (params, *inputs) that does the same in training.
AnyModel: TypeAlias = Any
LIBRARIES = {
    "equinox": "pass jt.models.from_equinox(lambda key: Net(key))",
    "flax": "pass jt.models.from_linen(module, x[:1])",
    "haiku": "pass jt.models.from_haiku(transformed, x[:1])",
    "torch": "JAX cannot differentiate torch's parameters: write the model with flax.nnx, "
    "and load its weights by jtrain.models.presets or from model.state_dict()",
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
        from jtrain.models.adapters.function import from_function

        return from_function(_no_init, model)._replace(couples="nothing")
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
    if library is None or is_nnx(model) or not _is_called(kind):
        return
    if isinstance(model, type):
        raise LossError(
            f"{model.__name__} is a class, and jtrain takes a model. Make an instance: "
            f"{model.__name__}(rngs=nnx.Rngs(0))."
        )
    raise LossError(f"{kind.__name__} is a model of {library}: {LIBRARIES[library]}.")


def _is_called(kind: type) -> bool:
    return any("__call__" in vars(cls) for cls in kind.__mro__[:-1])


def _no_init(key: Any) -> Any:
    """Raise: a function has no parameters of its own."""
    del key
    raise LossError(
        "a model that is a function has no parameters of its own. Pass the initial parameters: "
        "jt.fit(jt.classifier(function), params, data)."
    )
