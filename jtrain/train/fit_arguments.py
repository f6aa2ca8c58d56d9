"""Arguments of jt.fit: models and names given in code, as the parts of a run."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from pydantic import ValidationError

from jtrain.config.configclass import configclass
from jtrain.config.precision import Precision
from jtrain.config.schema import FieldSchema, describe_allowed, field_schemas
from jtrain.config.sections import Guard, RollbackPolicy
from jtrain.core.loss import Stateful
from jtrain.core.model import Model
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Extra, LossFn, Params, RowsInteract, Tree
from jtrain.data.sources.foreign import is_array, library_name, to_array
from jtrain.data.sources.source import to_native
from jtrain.errors import ConfigError, DataError, LossError
from jtrain.errors.plain_numbers import to_number
from jtrain.errors.spelling import did_you_mean
from jtrain.losses.metrics import Metric
from jtrain.models.adapters import check_model_type, is_nnx
from jtrain.models.model_loss import ModelLoss
from jtrain.optim import Optax, Optimizer
from jtrain.optim.by_name import optax_optimizers
from jtrain.optim.join import Schedule
from jtrain.optim.recipe import OptimizerConfig
from jtrain.optim.schedules import LearningRate
from jtrain.parallel import Auto, Layout, Parallel
from jtrain.train.trackers import Tracker, TrackerConfig, check_installed

RATES: Mapping[str, float] = {"adam": 1e-3, "adamw": 1e-3, "nadamw": 1e-3}

ARGUMENTS: Mapping[str, str] = {
    **{f"evaluate.{key}": f"valid_{key}" for key in ("every", "batch", "rows_interact")},
    "checkpoint.every": "checkpoint_every",
    "checkpoint.best": "best",
    "log.every": "every",
    "checks.first_batch": "check_batch",
}
"""Arguments of `fit` by the keys of a config, where they differ."""


def describe_argument(error: ValidationError, config: type) -> str:
    """Return which argument is wrong, and what it may be: `steps=0: must be a whole number ...`."""
    first = error.errors()[0]
    keys = [str(key) for key in first["loc"]]
    name = ARGUMENTS.get(".".join(keys), ".".join(keys))
    want = FieldSchema(config)
    for key in keys:
        want = field_schemas(want.classes()[0]).get(key) if want and want.classes() else None
    if own := first.get("ctx", {}).get("error"):
        must = str(own)
    elif want:
        must = f"must be {describe_allowed(want)}"
        duration = name == "steps" or name.endswith("every")
        must += ', or a duration such as "3 epochs"' if duration else ""
    else:
        must = first["msg"].replace("Input should be", "must be")
    return f"{name}={first['input']!r}: {must}{'' if must.endswith(('.', '?')) else '.'}"


def build_steps(steps: int | str | None, epochs: int | float | None) -> Any:
    """Return the length of a run: its steps, or a duration in epochs.

    Raises:
        ConfigError: if neither is given, or both.
    """
    if (steps is None) == (epochs is None):
        given = "neither was" if steps is None else "both were"
        raise ConfigError(
            f"fit needs either steps= or epochs=, and {given} given. Write epochs=5, or steps=1000."
        )
    if epochs is not None and not epochs > 0:
        raise ConfigError(f"epochs={epochs!r}: must be a number above 0, such as 3 or 0.5.")
    return steps if epochs is None else f"{epochs:g} epochs"


class FitStart(NamedTuple):
    """Loss and initial parameters of a run."""

    loss: LossFn | Stateful
    init: Any  # (params, extra), or a function of a key that makes them
    rows_interact: RowsInteract
    module: Any = None  # SplitModule of the nnx module that holds the parameters
    declared: bool = False  # whether `rows_interact` was given, which holds in evaluation too


def build_loss(
    loss: Any, metrics: Sequence[str | Metric], class_weight: Mapping[int, float] | None = None
) -> Any:
    """Return the loss with further metrics, and weights by class.

    Raises:
        ConfigError: if a metric or a label is unknown, or the loss is not built from a model.
    """
    if not metrics and class_weight is None:
        return loss
    if not isinstance(loss, ModelLoss):
        name = "metrics" if metrics else "class_weight"
        raise ConfigError(
            f"{name}= is for a loss that is built from a model (jt.classifier, jt.regression), and "
            f"this one is a function, from which the model's outputs are not known. Compute it "
            f"there: return value, {{'accuracy': jt.metrics.accuracy(logits, labels, mask)}}, with "
            f"value = jt.Mean.of(nats, mask, weights)."
        )
    loss = loss if class_weight is None else loss.with_class_weight(class_weight)
    return loss.with_metrics(metrics) if metrics else loss


def build_trackers(
    given: Sequence[str | TrackerConfig], *, has_directory: bool
) -> tuple[TrackerConfig, ...]:
    """Return the configs of trackers, given by name or value.

    Raises:
        ConfigError: for an unknown tracker, or a run without a directory.
    """
    if isinstance(given, str):
        raise ConfigError(f'trackers= is a list: write trackers=["{given}"].')
    if given and not has_directory:
        raise ConfigError(
            'trackers= need the directory of a run. Give the run a name: name="mine", which is '
            "written to runs/mine."
        )
    found = [_named("trackers", x, Tracker)() if isinstance(x, str) else x for x in given]
    check_installed(found)
    return tuple(found)


def build_start(
    loss: Any, params: Any, extra: Extra = (), rows_interact: RowsInteract | None = None
) -> FitStart:
    """Return the loss as a function of arrays, and the initial arrays.

    If the parameters are an nnx module, a plain loss is a function of (module, batch, rng). If
    `rows_interact` is not given, the layers of the model decide it.

    Raises:
        LossError: for a model of another library, or a loss that cannot be called.
        DataError: for parameters that cannot be trained.
    """
    if is_nnx(loss):
        raise LossError(
            "fit takes a loss first, then the model, then the data, but the first argument is a "
            "model. Write jt.fit(jt.classifier(model), model, (x, y)), or jt.regression."
        )
    check_model_type(params)
    declared = rows_interact is not None
    rows_interact = rows_interact or (
        loss.rows_interact if isinstance(loss, ModelLoss) else "never"
    )
    if is_nnx(params):
        from jtrain.models.adapters.nnx import SplitModule, module_loss

        module = SplitModule(params)
        if not isinstance(loss, Stateful):
            loss = module_loss(loss, module)
            rows_interact = rows_interact if declared else module.rows_interact
        given, carried = module.arrays()
        return FitStart(loss, (given, extra or carried), rows_interact, module, declared)
    if isinstance(params, Model):
        return FitStart(loss, params.init, rows_interact, declared=declared)
    start = params if callable(params) else build_weights(params, extra)
    return FitStart(loss, start, rows_interact, declared=declared)


def build_weights(params: Params, extra: Extra) -> tuple[Params, Extra]:
    """Return parameters and extra as arrays; the parameters are trainable.

    Raises:
        DataError: if a parameter holds integers or no numbers, or if `params` is a generator.
    """
    if isinstance(params, Iterator):
        raise DataError(
            f"The parameters are a {type(params).__name__}, which gives its arrays once and has no "
            f"names. Make a dict of arrays; for a torch module dict(model.named_parameters())."
        )
    converted = to_arrays((params, extra))
    check_trainable(converted[0])
    return converted


def check_trainable(params: Params) -> None:
    """Raise unless a loss can be differentiated with respect to each parameter.

    Raises:
        DataError: naming the first parameter that holds integers or is not an array.
    """
    for name, leaf in named_leaves(params).items():
        parameter = f"The parameter {name}" if name else "The parameter"
        dtype = getattr(leaf, "dtype", type(leaf))
        array = is_array(leaf) and library_name(leaf) != "torch"
        if not array and dtype not in (int, float):
            raise DataError(
                f"{parameter} is a {type(leaf).__name__}, and parameters are arrays of numbers, of "
                f"numpy or JAX: jnp.asarray(...); jnp.asarray(x.numpy()) for a torch tensor."
            )
        if not jax.numpy.issubdtype(dtype, np.inexact):
            raise DataError(
                f"{parameter} holds {getattr(dtype, '__name__', dtype)} values, and only floating "
                f"point numbers can be trained: give it as float32, or in extra= if it is constant."
            )


def to_arrays(tree: Tree) -> Tree:
    """Convert each leaf, also plain numbers and torch tensors, to an array of numpy or JAX."""

    def leaf(path: Any, x: Any) -> Any:
        x = to_array(x)
        x = x if is_array(x) else np.asarray(x)
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return to_native(name, x) if isinstance(x, np.ndarray) and x.dtype.kind in "fc" else x

    return jax.tree.map_with_path(leaf, tree)


@configclass
class CustomOptimizer:
    """Optimizer that was given in code, not by the values of a config."""

    kind: str = "optax"

    def learning_rate(self, steps: int) -> LearningRate | None:
        """Return None: the learning rate is unknown."""
        del steps


def build_optimizer(
    given: str | OptimizerConfig | optax.GradientTransformation,
    lr: float | None,
    schedule: str | Schedule | None,
) -> OptimizerConfig | CustomOptimizer:
    """Return the config of an optimizer, given by name or value; a transformation gives
    `CustomOptimizer`.

    Raises:
        ConfigError: for an unknown name, or if `lr` or `schedule` is missing or given twice.
    """
    if callable(lr):
        raise ConfigError(
            f"lr= is a number, and this is a function of the step: write optimizer="
            f'optax.{given}(lr), or a schedule by name, schedule="cosine".'
        )
    if isinstance(given, str):
        cls = _named_optimizer(given)
        if lr is None and given not in RATES:
            raise ConfigError(
                f'optimizer="{given}" has no default learning rate: give one, such as lr=0.01.'
            )
        if schedule is None or isinstance(schedule, str):
            schedule = _named("schedule", schedule or "constant", Schedule)()
        return cls(lr=RATES[given] if lr is None else lr, schedule=schedule)
    if not isinstance(given, OptimizerConfig | optax.GradientTransformation):
        raise ConfigError(
            f'optimizer= is a name such as "adamw", a value of jtrain.optim or an optax '
            f"transformation, and this is a {type(given).__name__}: write "
            f'optimizer="adamw", lr=1e-3.'
        )
    if lr is not None or schedule is not None:
        name = "lr" if lr is not None else "schedule"
        raise ConfigError(
            f"{name}= is for an optimizer given by name, and this one is a "
            f"{type(given).__name__}, which has its own: omit {name}=, or set it there."
        )
    return CustomOptimizer() if isinstance(given, optax.GradientTransformation) else given


def build_strategy(given: str | Parallel, devices: Any = 0) -> Parallel:
    """Return the config of a strategy, given by name or value, over these devices.

    Args:
        devices: as `parallel.devices` of a config, or devices of JAX; 0: those of `given`.

    Raises:
        ConfigError: for an unknown strategy or device.
    """
    found = _named("parallel", given, Parallel)() if isinstance(given, str) else given
    devices = devices.tolist() if is_array(devices) else devices
    if isinstance(devices, int) and not devices:
        return found
    try:
        return dataclasses.replace(found, devices=_as_config(devices))
    except ValidationError as error:
        first = error.errors()[0]
        why = first.get("ctx", {}).get("error", first["msg"])
        raise ConfigError(f"devices={devices!r}: {why}.") from None


def _as_config(devices: Any) -> Any:
    """Return devices as a config writes them: devices of JAX by their platform and index."""
    if isinstance(devices, jax.Device):
        index = jax.local_devices(backend=devices.platform).index(devices)
        return f"{devices.platform}:{index}"
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return tuple(map(_as_config, devices))
    return to_number(devices)


def build_layout(given: str | Parallel, devices: Any = 0) -> Layout:
    """Return the config of a layout, given by name or value, over these devices.

    Raises:
        ConfigError: for `auto`, which needs a training step.
    """
    found = build_strategy(given, devices)
    if isinstance(found, Auto):
        raise ConfigError(
            'parallel="auto" is chosen by the memory of a training step, and nothing is trained '
            'here. Write parallel="mirrored", or "fsdp" for weights that do not fit one device.'
        )
    return found


def build_precision(given: str | Precision) -> Precision:
    """Return the config of a precision, given by name or value."""
    named = isinstance(given, str | int)
    return _named("precision", given, Precision)() if named else given


def build_guard(given: str | Guard, *, has_checkpoints: bool) -> Guard:
    """Return the policy for bad steps, given by name or value.

    Raises:
        ConfigError: for a rollback policy without checkpoints.
    """
    found = _named("guard", given, Guard)() if isinstance(given, str) else given
    if isinstance(found, RollbackPolicy) and not has_checkpoints:
        raise ConfigError(
            'guard="rollback" needs a checkpoint to return to, and this run saves none. Give the '
            'run a name, name="mine", which saves it to runs/mine; or write guard="skip".'
        )
    return found


def _named_optimizer(name: str) -> Callable[..., OptimizerConfig]:
    want, of_optax = FieldSchema.of(Optimizer), optax_optimizers()
    if found := want.class_of(name):
        return found
    if name in of_optax:
        return functools.partial(Optax, name=name)
    near = did_you_mean(name, [*want.kinds(), *of_optax])
    raise ConfigError(
        f'optimizer="{name}" is not one of {", ".join(want.kinds())}{near}; or the name of an '
        f"optimizer of optax"
    )


def _named(what: str, name: Any, union: Any) -> Any:
    want = FieldSchema.of(union)
    if found := want.class_of(str(name)):
        return found
    near = did_you_mean(str(name), want.kinds())
    raise ConfigError(f'{what}="{name}" is not one of {", ".join(want.kinds())}{near}')
