"""jtrain: any pure loss function, on any number of devices, with one result.

The names are imported when they are used, so that `jtrain --help` does not wait for JAX.
"""

import importlib
import os
import sys

TYPE_CHECKING = False  # typing may lie in the current directory, see below

if sys.version_info < (3, 11):  # noqa: UP036  # pip refuses it, a clone on PYTHONPATH does not
    _OLD = (
        "jtrain needs Python 3.11 or newer, and this is {}.{}.{} at {}. Make an environment with a "
        "newer one: pip install uv && uv venv --python 3.12 && source .venv/bin/activate && "
        "uv pip install jtrain".format(*sys.version_info[:3], sys.executable)
    )
    if sys.argv[:1] == ["-m"]:  # python -m jtrain: the package is being located
        sys.stderr.write(_OLD + "\n")
        sys.exit(2)
    raise ImportError(_OLD)

if sys.argv[:1] == ["-m"]:
    from jtrain.io.environment import distrust_current_directory

    distrust_current_directory()

if {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"} & set(os.environ):  # several CPU devices, it may be
    importlib.import_module("jtrain.distributed.cpu_threads").size_thread_pool()

if TYPE_CHECKING:
    __version__: str
    from jtrain import data as data
    from jtrain import errors as errors
    from jtrain import finetune as finetune
    from jtrain import losses as losses
    from jtrain import models as models
    from jtrain import optim as optim
    from jtrain import parallel as parallel
    from jtrain import testing as testing
    from jtrain import train as train
    from jtrain import types as types
    from jtrain.config import precision as precision
    from jtrain.config.configclass import configclass as configclass
    from jtrain.config.registry import Kind as Kind
    from jtrain.config.registry import Registry as Registry
    from jtrain.config.resolve import resolve as resolve
    from jtrain.core.evaluate import make_evaluate as make_evaluate
    from jtrain.core.loop import Hook as Hook
    from jtrain.core.loop import Rollback as Rollback
    from jtrain.core.loop import Stop as Stop
    from jtrain.core.loop import train_loop as train_loop
    from jtrain.core.loss import stateful as stateful
    from jtrain.core.mean import Mean as Mean
    from jtrain.core.mean import Terms as Terms
    from jtrain.core.model import Model as Model
    from jtrain.core.rows import row_keys as row_keys
    from jtrain.core.state import TrainState as TrainState
    from jtrain.core.state import new_state as new_state
    from jtrain.core.step import make_step as make_step
    from jtrain.core.step import scan_steps as scan_steps
    from jtrain.losses import metrics as metrics
    from jtrain.models.generate import generate as generate
    from jtrain.models.ready_losses import binary_classifier as binary_classifier
    from jtrain.models.ready_losses import classifier as classifier
    from jtrain.models.ready_losses import language_model as language_model
    from jtrain.models.ready_losses import regression as regression
    from jtrain.train import hooks as hooks
    from jtrain.train import ray as ray
    from jtrain.train import trackers as trackers
    from jtrain.train.check_batch.first_batch import check_batch as check_batch
    from jtrain.train.experiment import Experiment as Experiment
    from jtrain.train.experiment import Prompt as Prompt
    from jtrain.train.experiment import RunConfig as RunConfig
    from jtrain.train.fit import fit as fit
    from jtrain.train.fit_result import Fitted as Fitted
    from jtrain.train.hooks.evaluation import EarlyStop as EarlyStop
    from jtrain.train.loaded_run import LoadedRun as LoadedRun
    from jtrain.train.loaded_run import load as load
    from jtrain.train.predict import evaluate as evaluate
    from jtrain.train.predict import predict as predict
    from jtrain.train.processes import join_processes as join_processes
    from jtrain.train.run import run as run
else:

    def __getattr__(name):
        if name == "__version__":
            return importlib.import_module("jtrain.io.environment").jtrain_version()
        return importlib.import_module("jtrain.io.lazy_names").import_name("jtrain", name)

    def __dir__():
        return importlib.import_module("jtrain.io.lazy_names").list_names("jtrain")
