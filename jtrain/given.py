"""What a caller gives in code, arrays and names, as what a run is made of."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast, get_args

import jax
import numpy as np
import optax
from pydantic import ValidationError

from jtrain.config.guard import Guard, Rollback
from jtrain.config.nearest import did_you_mean
from jtrain.data import Arrays, InOrder, Shuffled, Source
from jtrain.errors import ConfigError, DataError
from jtrain.optim import Optimizer
from jtrain.optim.recipe import Recipe
from jtrain.optim.schedules import LearningRate, Schedule
from jtrain.parallel import Auto, Layout, Parallel
from jtrain.precision import Precision
from jtrain.trees import named_leaves
from jtrain.types import Batches, Extra, Once, Params, Tree
from jtrain.values import values

# Arrays by name; `x` or `(x, y)`, which are then called so; rows by index; or batches as they are.
Data: TypeAlias = Any
RATES: Mapping[str, float] = {"adam": 1e-3, "adamw": 1e-3, "nadamw": 1e-3}


def shuffled(data: Data, size: int | None, *, seed: int) -> Batches:
    """Batches to train by: every row once an epoch, 32 rows each if `size` is None.

    Raises:
        DataError: if it is nothing that has rows.
        ConfigError: if it has batches of another size already.
    """
    if not isinstance(data, Batches):
        return Shuffled(_source(data), size=size or 32, seed=seed)
    if size not in (None, data.size):
        raise ConfigError(
            f"batch={size} was asked of batches of {data.size} rows each: leave batch= out, or "
            f"give the rows themselves, a source or arrays."
        )
    return data


def once(data: Data, size: int) -> Once:
    """Batches of `size` rows that go over the data once, in its order.

    Raises:
        DataError: if it is nothing that has rows, or batches that never end.
    """
    if isinstance(data, Once):
        return data
    if isinstance(data, Batches):
        raise DataError(
            f"A {type(data).__name__} never ends, and a whole data set was asked for: give its "
            f"rows, a source or arrays, or jtrain.data.InOrder(rows, size={data.size})."
        )
    return InOrder(_source(data), size=size)


def sets(valid: Data, size: int) -> Once | Mapping[str, Once] | None:
    """What a run is judged by: one data set, several by name, or none."""
    if isinstance(valid, Mapping) and any(_has_rows(x) for x in valid.values()):
        return {name: once(data, size) for name, data in valid.items()}
    return None if valid is None else once(valid, size)


def _source(data: Data) -> Source:
    if isinstance(data, Mapping):
        return Arrays(**data)
    if isinstance(data, tuple) and len(data) == 2:
        return Arrays(x=data[0], y=data[1])
    if _is_array(data):
        return Arrays(x=data)
    if isinstance(data, Source) and not isinstance(data, list | tuple | str):
        return data
    raise DataError(
        f"Data is arrays by name, (x, y), a source of rows or batches, and this is a "
        f"{type(data).__name__}. Give arrays: dict(x=np.asarray(...), y=np.asarray(...))."
    )


def _has_rows(x: Any) -> bool:
    """Whether it is a data set and no array of one."""
    if _is_array(x) or isinstance(x, list):
        return False
    return isinstance(x, Mapping | tuple | Batches | Source)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def weights(params: Params, extra: Extra) -> tuple[Params, Extra]:
    """Both, as arrays; a loss can be differentiated by each of the parameters.

    Raises:
        DataError: if a parameter holds whole numbers, or what is no number.
    """
    made = arrays((params, extra))
    for name, leaf in named_leaves(made[0]).items():
        if not jax.numpy.issubdtype(leaf.dtype, np.inexact):
            raise DataError(
                f"The parameter {name} holds {leaf.dtype} values, and only numbers with a fraction "
                f"can be trained: give it as float32, or in extra= if it stays as it is."
            )
    return made


def arrays(tree: Tree) -> Tree:
    """Each leaf as an array, plain numbers too."""
    return jax.tree.map(lambda x: x if _is_array(x) else np.asarray(x), tree)


@values
class Handed:
    """An optimizer made by other means than the values of a config."""

    kind: str = "optax"

    def learning_rate(self, steps: int) -> LearningRate | None:
        """None that is known."""
        del steps


def optimizer(
    given: str | Recipe | optax.GradientTransformation,
    lr: float | None,
    schedule: str | Schedule | None,
) -> Recipe | Handed:
    """The values of an optimizer, by its name or itself; `Handed` for a transformation.

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
    if isinstance(given, Recipe):
        return given
    if isinstance(given, optax.GradientTransformation):
        return Handed()
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
        raise ConfigError(f"devices={devices!r}: {error.errors()[0]['ctx']['error']}.") from None


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
    if isinstance(found, Rollback) and not kept:
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
