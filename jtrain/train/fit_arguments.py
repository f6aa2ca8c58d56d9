"""What a caller gives in code, arrays and names, as what a run is made of."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast, get_args

import jax
import numpy as np
import optax
from pydantic import ValidationError

from jtrain.config.configclass import configclass
from jtrain.config.guard import Guard, RollbackPolicy
from jtrain.config.precision import Precision
from jtrain.config.suggestions import did_you_mean
from jtrain.core.batches import Batches, FiniteBatches
from jtrain.core.loss import Stateful
from jtrain.core.model import Model
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Couples, Extra, LossFn, Params, Tree
from jtrain.data import Arrays, InOrder, Shuffled, Source
from jtrain.data.sources.hugging_face import HuggingFace
from jtrain.data.sources.subset import keep_back
from jtrain.data.sources.torch_rows import TorchRows, from_loader
from jtrain.errors import ConfigError, DataError, LossError
from jtrain.models.adapters.any_model import is_nnx, refuse_foreign
from jtrain.models.model_loss import ModelLoss
from jtrain.optim import Optimizer
from jtrain.optim.recipe import OptimizerConfig
from jtrain.optim.schedules import LearningRate, Schedule
from jtrain.parallel import Auto, Layout, Parallel
from jtrain.train.foreign_arrays import as_array, columns_of, library

# Arrays by name; `x` or `(x, y)`, which are then called so; rows by index; or batches as they are.
Data: TypeAlias = Any
RATES: Mapping[str, float] = {"adam": 1e-3, "adamw": 1e-3, "nadamw": 1e-3}


def shuffled(data: Data, size: int | None, *, seed: int) -> Batches:
    """Batches to train by: every row once an epoch, 32 rows each if `size` is None.

    Raises:
        DataError: if it is nothing that has rows.
        ConfigError: if it has batches of another size already.
    """
    size = size or loader_size(data)
    data = _of_torch(data)
    if not isinstance(data, Batches):
        return Shuffled(_source(data), size=size or 32, seed=seed)
    if size not in (None, data.size):
        raise ConfigError(
            f"batch={size} was asked of batches of {data.size} rows each: leave batch= out, or "
            f"give the rows themselves, a source or arrays."
        )
    return data


def loader_size(data: Data) -> int | None:
    """The rows in a batch of a torch DataLoader; None for anything else."""
    torch = sys.modules.get("torch.utils.data")
    return data.batch_size if torch is not None and isinstance(data, torch.DataLoader) else None


def split(data: Data, valid: Data) -> tuple[Data, Data]:
    """The data to train by, and to judge by; a share as `valid` is held out of the data.

    Raises:
        ConfigError: for a share that is not between 0 and 1, or leaves either without rows.
        DataError: if the data is no rows by index.
    """
    if not isinstance(valid, float):
        return data, valid
    source = _source(_of_torch(data))
    judged = round(len(source) * valid)
    if not 0 < judged < len(source):
        raise ConfigError(
            f"valid={valid:g} of {len(source)} rows was to be held out, that is {judged}. Write "
            f"a share such as valid=0.2, or give the rows: valid=(x, y)."
        )
    return keep_back(source, valid)


def once(data: Data, size: int) -> FiniteBatches:
    """Batches of `size` rows that go over the data once, in its order.

    Raises:
        DataError: if it is nothing that has rows, or batches that never end.
    """
    data = _of_torch(data)
    if isinstance(data, FiniteBatches):
        return data
    if isinstance(data, Batches):
        raise DataError(
            f"A {type(data).__name__} never ends, and a whole data set was asked for: give its "
            f"rows, a source or arrays, or jtrain.data.InOrder(rows, size={data.size})."
        )
    return InOrder(_source(data), size=size)


def sets(valid: Data, size: int) -> FiniteBatches | Mapping[str, FiniteBatches] | None:
    """What a run is judged by: one data set, several by name, or none."""
    if isinstance(valid, Mapping) and any(_has_rows(x) for x in valid.values()):
        return {name: once(data, size) for name, data in valid.items()}
    return None if valid is None else once(valid, size)


def _source(data: Data) -> Source:
    if (table := columns_of(data)) is not None:
        return Arrays(**table)
    if isinstance(data, Mapping):
        return Arrays(**{name: as_array(array) for name, array in data.items()})
    if isinstance(data, tuple) and len(data) == 2:
        return Arrays(x=as_array(data[0]), y=as_array(data[1]))
    if _is_array(data):
        return Arrays(x=as_array(data))
    if library(data) == "datasets":
        return HuggingFace(data)
    if isinstance(data, Source) and not isinstance(data, list | tuple | str):
        return data
    raise DataError(
        f"Data is arrays by name, (x, y), a source of rows or batches, and this is a "
        f"{type(data).__name__}. {_how(data)}"
    )


def _how(data: Data) -> str:
    """What to write for data of another kind."""
    if library(data) == "tensorflow":
        return "Write jtrain.data.Loaded(data.as_numpy_iterator, size=32), of batches by name."
    if isinstance(data, str):
        return (
            "Read a file first, np.load(FILE). Text becomes tokens, jtrain data prepare FILE --out "
            "FOLDER, and those rows: jtrain.data.Windows(TokenFiles(FOLDER), context=64)."
        )
    if isinstance(data, tuple):
        return f"Give {len(data)} arrays names: dict(x=..., y=..., weight=...)."
    if hasattr(data, "__iter__") and not isinstance(data, str | list):
        return (
            "Of what can only be read in order, give a function that opens it: "
            "jtrain.data.Loaded(lambda: batches_by_name(), size=32)."
        )
    return "Give arrays: dict(x=np.asarray(...), y=np.asarray(...))."


def _of_torch(data: Data) -> Any:
    """A torch DataLoader or data set as rows, or as batches where it streams; else `data`."""
    torch = sys.modules.get("torch.utils.data")
    if torch is not None and isinstance(data, torch.DataLoader):
        return from_loader(data)
    if torch is not None and isinstance(data, torch.Dataset) and hasattr(data, "__len__"):
        return TorchRows(data, torch.default_collate)
    return data


def _has_rows(x: Any) -> bool:
    """Whether it is a data set and no array of one."""
    x = _of_torch(x)
    if _is_array(x) or isinstance(x, list):
        return False
    return isinstance(x, Mapping | tuple | Batches | Source)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def lasts(steps: int | str | None, epochs: int | float | None) -> Any:
    """How long a run lasts: the steps, or a duration in epochs.

    Raises:
        ConfigError: if neither is said, or both.
    """
    if (steps is None) == (epochs is None):
        said = "neither was" if steps is None else "both were"
        raise ConfigError(
            f"fit lasts so many steps or so many epochs, and {said} said. Write epochs=5, or "
            f"steps=1000."
        )
    return steps if epochs is None else f"{epochs:g} epochs"


class FitStart(NamedTuple):
    """A loss, and where its parameters start."""

    loss: LossFn | Stateful
    init: Any  # (params, extra), or what makes them of a key
    couples: Couples
    module: Any = None  # SplitModule of an nnx module, whose arrays the parameters are


def start(loss: Any, params: Any, extra: Extra = (), couples: Couples | None = None) -> FitStart:
    """Return the loss of arrays and the arrays, of whatever the caller has them in.

    With an nnx module for parameters a plain loss is one of (module, batch, rng). Where `couples`
    is not said, the model says what its layers do.

    Raises:
        LossError: for a model of another library, or a loss that cannot be called.
        DataError: for parameters that cannot be trained.
    """
    if is_nnx(loss):
        raise LossError(
            "fit takes first a loss, then the model, then the data, and the first of these is the "
            "model. Write jt.fit(jt.classifier(model), model, (x, y)), or jt.regression."
        )
    refuse_foreign(params)
    meets = couples or (loss.couples if isinstance(loss, ModelLoss) else "nothing")
    if is_nnx(params):
        from jtrain.models.adapters.module_loss import module_loss
        from jtrain.models.adapters.nnx import SplitModule

        module = SplitModule(params)
        if not isinstance(loss, Stateful):
            loss, meets = module_loss(loss, module), couples or module.couples
        given, carried = module.arrays()
        return FitStart(loss, (given, extra or carried), meets, module)
    if isinstance(params, Model):
        return FitStart(loss, params.init, meets)
    return FitStart(loss, params if callable(params) else weights(params, extra), meets)


def weights(params: Params, extra: Extra) -> tuple[Params, Extra]:
    """Both, as arrays; a loss can be differentiated by each of the parameters.

    Raises:
        DataError: if a parameter holds whole numbers, or what is no number, or it is a generator.
    """
    if isinstance(params, Iterator):
        raise DataError(
            f"The parameters are a {type(params).__name__}, which gives its arrays once and has no "
            f"names. Make a dict of arrays, dict(model.named_parameters()) of a torch module."
        )
    made = arrays((params, extra))
    check_trainable(made[0])
    return made


def check_trainable(params: Params) -> None:
    """Check that a loss can be differentiated by each of the parameters.

    Raises:
        DataError: naming the first that holds whole numbers, or what is no array.
    """
    for name, leaf in named_leaves(params).items():
        of = f"The parameter {name}" if name else "The parameter"
        dtype = getattr(leaf, "dtype", None)
        if dtype is None and not isinstance(leaf, int | float):
            raise DataError(
                f"{of} is a {type(leaf).__name__}, and parameters are arrays of numbers. Make it "
                f"one: jnp.asarray(...)."
            )
        if library(leaf) == "torch" or str(dtype) == "object":
            raise DataError(
                f"{of} is no array of numpy or JAX. Make it one: jnp.asarray(x.numpy()) of a torch "
                f"tensor; a function or a text is no parameter."
            )
        if not jax.numpy.issubdtype(dtype or type(leaf), np.inexact):
            raise DataError(
                f"{of} holds {dtype or type(leaf).__name__} values, and only numbers with a "
                f"fraction can be trained: give it as float32, or in extra= if it stays as it is."
            )


def arrays(tree: Tree) -> Tree:
    """Each leaf as an array of numpy or JAX, plain numbers and torch tensors too."""

    def leaf(x: Any) -> Any:
        x = as_array(x)
        return x if _is_array(x) else np.asarray(x)

    return jax.tree.map(leaf, tree)


@configclass
class CustomOptimizer:
    """An optimizer made by other means than the values of a config."""

    kind: str = "optax"

    def learning_rate(self, steps: int) -> LearningRate | None:
        """None that is known."""
        del steps


def optimizer(
    given: str | OptimizerConfig | optax.GradientTransformation,
    lr: float | None,
    schedule: str | Schedule | None,
) -> OptimizerConfig | CustomOptimizer:
    """The values of an optimizer, by its name or itself; `CustomOptimizer` for a transformation.

    Raises:
        ConfigError: if there is none of that name, or `lr` and `schedule` are said twice or not at
            all.
    """
    if isinstance(given, str):
        cls = _named("optimizer", given, Optimizer)
        if lr is None and given not in RATES:
            raise ConfigError(
                f'optimizer="{given}" has no learning rate that fits most: give one, lr=0.01 say.'
            )
        made = _named("schedule", schedule or "constant", Schedule) if _is_name(schedule) else None
        rate = RATES[given] if lr is None else lr
        return cls(lr=rate, schedule=made() if made else schedule)
    if lr is not None or schedule is not None:
        said = "lr" if lr is not None else "schedule"
        raise ConfigError(
            f"{said}= goes with an optimizer that is named, and this one is a "
            f"{type(given).__name__}, which has its own: leave {said}= out, or set it there."
        )
    if isinstance(given, OptimizerConfig):
        return given
    if isinstance(given, optax.GradientTransformation):
        return CustomOptimizer()
    raise ConfigError(
        f'optimizer= is a name such as "adamw", a value of jtrain.optim or an optax '
        f'transformation, and this is a {type(given).__name__}: write optimizer="adamw", lr=1e-3.'
    )


def _is_name(schedule: Any) -> bool:
    return schedule is None or isinstance(schedule, str)


def strategy(given: str | Parallel, devices: Any = 0) -> Parallel:
    """Return the values of a strategy, by its name or itself, over these devices.

    Args:
        devices: as `parallel.devices` of a config, or devices of JAX; 0: those of `given`.

    Raises:
        ConfigError: for what is no strategy, or no device.
    """
    found = _named("parallel", given, Parallel)() if isinstance(given, str) else given
    if isinstance(devices, int) and not devices:
        return found
    try:
        return dataclasses.replace(found, devices=_written(devices))
    except ValidationError as error:
        first = error.errors()[0]
        why = first.get("ctx", {}).get("error", first["msg"])
        raise ConfigError(f"devices={devices!r}: {why}.") from None


def _written(devices: Any) -> Any:
    """Return devices as a config writes them: those of JAX by their platform and index."""
    if isinstance(devices, jax.Device):
        index = jax.local_devices(backend=devices.platform).index(devices)
        return f"{devices.platform}:{index}"
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return tuple(_written(each) if isinstance(each, jax.Device) else each for each in devices)
    return devices


def layout(given: str | Parallel, devices: Any = 0) -> Layout:
    """The values of a layout, by its name or itself, over these devices.

    Raises:
        ConfigError: for `auto`, which goes by what a step takes.
    """
    found = strategy(given, devices)
    if isinstance(found, Auto):
        raise ConfigError(
            'parallel="auto" is found by what a training step takes, and nothing is trained here. '
            'Write parallel="mirrored", or "fsdp" for weights that no device holds whole.'
        )
    return found


def precision(given: str | Precision) -> Precision:
    """The values of a precision, by its name or itself."""
    return _named("precision", given, Precision)() if isinstance(given, str) else given


def guard(given: str | Guard, *, kept: bool) -> Guard:
    """The values of what is done about bad steps, by its name or itself.

    Args:
        kept: whether the run lies in a directory, with checkpoints.

    Raises:
        ConfigError: for one that goes back, where nothing is kept to go back to.
    """
    found = _named("guard", given, Guard)() if isinstance(given, str) else given
    if isinstance(found, RollbackPolicy) and not kept:
        raise ConfigError(
            'guard="rollback" goes back to a checkpoint, and this run keeps none. Give it a name, '
            'name="mine", and it lies in runs/mine; or write guard="skip".'
        )
    return found


def _named(what: str, name: Any, union: Any) -> Any:
    """The class of a kind."""
    members = get_args(get_args(union)[0])
    kinds = {cls.__pydantic_fields__["kind"].default: cls for cls in members}
    if name in kinds:
        return kinds[cast(str, name)]
    near = did_you_mean(str(name), kinds) or f'; write {what}="{next(iter(kinds))}"'
    raise ConfigError(f'{what}="{name}" is none of {", ".join(kinds)}{near}')
