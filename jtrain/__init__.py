"""jtrain: any pure loss function, on any number of devices, with one result.

The names in the order data flows. They are imported when they are used, so that `jtrain --help`
does not wait for JAX.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from jtrain.evaluate import make_evaluate as make_evaluate
    from jtrain.experiment import Experiment as Experiment
    from jtrain.experiment import Prompt as Prompt
    from jtrain.experiment import RunConfig as RunConfig
    from jtrain.first_batch import check_batch as check_batch
    from jtrain.fit import fit as fit
    from jtrain.fitted import Fitted as Fitted
    from jtrain.hooks.early_stop import EarlyStop as EarlyStop
    from jtrain.joined import join_processes as join_processes
    from jtrain.load_run import LoadedRun as LoadedRun
    from jtrain.load_run import load as load
    from jtrain.loop import Hook as Hook
    from jtrain.loop import Rollback as Rollback
    from jtrain.loop import Stop as Stop
    from jtrain.loop import train as train
    from jtrain.model_loss import binary_classifier as binary_classifier
    from jtrain.model_loss import classifier as classifier
    from jtrain.model_loss import language_model as language_model
    from jtrain.model_loss import regression as regression
    from jtrain.models.generate import generate as generate
    from jtrain.predict import evaluate as evaluate
    from jtrain.predict import predict as predict
    from jtrain.rows import row_keys as row_keys
    from jtrain.run import run as run
    from jtrain.state import TrainState as TrainState
    from jtrain.state import new_state as new_state
    from jtrain.step import make_step as make_step
    from jtrain.step import many as many
    from jtrain.types import Mean as Mean
    from jtrain.types import Model as Model
    from jtrain.types import Terms as Terms
    from jtrain.types import stateful as stateful
    from jtrain.values import values as values

_HOME = {
    "values": "values",
    "Mean": "types",
    "Terms": "types",
    "Model": "types",
    "stateful": "types",
    "row_keys": "rows",
    "classifier": "model_loss",
    "binary_classifier": "model_loss",
    "regression": "model_loss",
    "language_model": "model_loss",
    "Experiment": "experiment",
    "RunConfig": "experiment",
    "Prompt": "experiment",
    "generate": "models.generate",
    "TrainState": "state",
    "new_state": "state",
    "make_step": "step",
    "many": "step",
    "make_evaluate": "evaluate",
    "check_batch": "first_batch",
    "Hook": "loop",
    "Rollback": "loop",
    "Stop": "loop",
    "train": "loop",
    "EarlyStop": "hooks.early_stop",
    "run": "run",
    "fit": "fit",
    "Fitted": "fitted",
    "join_processes": "joined",
    "load": "load_run",
    "LoadedRun": "load_run",
    "evaluate": "predict",
    "predict": "predict",
}
# Packages and the errors, imported when they are first used: `jt.optim.AdamW(lr=1e-3)`.
_PACKAGES = {
    "data": "data",
    "errors": "errors",
    "losses": "losses",
    "models": "models",
    "optim": "optim",
    "parallel": "parallel",
    "precision": "precision.kinds",
    "testing": "testing",
    "trackers": "trackers",
}
# Pyright reads lists that are written out, and would have a second copy of the names above.
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


class _Jtrain(ModuleType):
    """The package. `jt.run` is the function also after `jtrain/run.py` was imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> object:
        if name in _PACKAGES:
            return importlib.import_module(f"jtrain.{_PACKAGES[name]}")
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("jtrain")
        if name not in _HOME:
            raise AttributeError(f"module 'jtrain' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"jtrain.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        """Return what a user may name, for tab completion: no imports and no internals."""
        return sorted([*__all__, *_PACKAGES, "__doc__", "__file__", "__name__", "__path__"])


sys.modules[__name__].__class__ = _Jtrain
