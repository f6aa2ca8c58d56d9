"""What a config's experiment is made of, before anything of it lies on a device."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jtrain.errors import ConfigError
from jtrain.experiment import Experiment, RunConfig
from jtrain.state import TrainState, new_state
from jtrain.types import Batch, Extra, Params, Placement

Weights: TypeAlias = tuple[Params, Extra]


def built(config: RunConfig, place: Placement) -> Experiment:
    """What the config's `build` gives.

    Raises:
        ConfigError: if that is no Experiment.
        DataError: if the data is not what the config says it is.
    """
    experiment = config.build(place)
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"experiment {config.experiment}: `build` is to return a jt.Experiment and returned a "
            f"{type(experiment).__name__}. Write `return jt.Experiment(init=..., loss=..., "
            f"train=..., optimizer=self.optimizer.build(self.steps))`."
        )
    return experiment


def makers(
    config: RunConfig, x: Experiment
) -> tuple[Callable[[], Weights], Callable[[Weights], TrainState]]:
    """The weights by the seed; and the state before the first step, from weights."""
    keys = lambda: jax.random.split(jax.random.key(config.seed))  # of the weights, of the run
    weights = lambda: x.init(keys()[0]) if callable(x.init) else x.init

    def state(weights: Weights) -> TrainState:
        params, extra = weights
        return new_state(params, x.optimizer, keys()[1], extra, scale=config.precision.scale())

    return weights, state


def shapes(batches: Any, *stack: int, parts: int = 1, part: tuple[int, int] | None = None) -> Batch:
    """A whole batch, or one of so many `parts`, as shapes and dtypes alone; or a stack of them.

    `part` is that of the rows which are read to find out: `Strategy.part`; none said, this
    process's of all processes.
    """
    of = lambda array: jax.ShapeDtypeStruct(
        (*stack, batches.size // parts, *array.shape[1:]),
        jax.dtypes.canonicalize_dtype(array.dtype),
    )
    seen = batches.shard(*part or (jax.process_index(), jax.process_count()))
    return {name: of(array) for name, array in seen[0].items()}
