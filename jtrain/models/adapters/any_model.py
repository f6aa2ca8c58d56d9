"""Models of any kind as a Model; those of other libraries are told how."""

import sys
from typing import Any, TypeAlias

from jtrain.core.model import Model
from jtrain.errors import LossError

# A Model, an nnx module, or a function of (params, *inputs) where there is nothing to switch.
AnyModel: TypeAlias = Any
LIBRARIES = {
    "equinox": "write jt.models.from_equinox(lambda key: Net(key)) and give that",
    "flax": "write jt.models.from_linen(module, x[:1]) and give that",
    "haiku": "write jt.models.from_haiku(transformed, x[:1]) and give that",
    "torch": "torch's parameters are none that JAX differentiates: write the model with flax.nnx, "
    "and load its weights by jtrain.models.presets or from model.state_dict()",
    "keras": "Keras' layers hold their own weights: write the model with flax.nnx",
    "tensorflow": "TensorFlow's variables are none that JAX differentiates: write the model with "
    "flax.nnx",
}


def as_model(model: AnyModel) -> Model:
    """Return a model of any kind as a `Model`.

    Raises:
        LossError: if it is none, or of a library whose models are adapted by hand.
    """
    if isinstance(model, Model):
        return model
    if is_nnx(model):
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s

        return from_nnx(model)
    refuse_foreign(model)
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


def refuse_foreign(model: Any) -> None:
    """Check that this is no model of a library that jtrain cannot take as it is.

    Raises:
        LossError: saying how its library's models are given.
    """
    kind = model if isinstance(model, type) else type(model)
    roots = [cls.__module__.partition(".")[0] for cls in kind.__mro__]
    library = next((root for root in roots if root in LIBRARIES), None)
    if library is None or is_nnx(model) or not _is_called(kind):
        return
    if isinstance(model, type):
        raise LossError(
            f"a model was to be given, and {model.__name__} is a class. Make one of it: "
            f"{model.__name__}(rngs=nnx.Rngs(0))."
        )
    raise LossError(f"a model of {library} was given, a {kind.__name__}: {LIBRARIES[library]}.")


def _is_called(kind: type) -> bool:
    return any("__call__" in vars(cls) for cls in kind.__mro__[:-1])


def _no_init(key: Any) -> Any:
    """Refuse to make parameters: a function has none."""
    del key
    raise LossError(
        "a model that is a function has no parameters of its own. Give those that it starts from: "
        "jt.fit(jt.classifier(function), params, data)."
    )
