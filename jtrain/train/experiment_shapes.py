"""Initial weights, state and batch shapes of an experiment, before anything is on a device."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jtrain.core.state import TrainState, new_state
from jtrain.core.types import Batch, Extra, Key, Params, Tree
from jtrain.errors import DataError, LossError
from jtrain.errors.user_code import user_code
from jtrain.train.experiment import Experiment, RunConfig
from jtrain.train.fit_arguments import check_trainable

Weights: TypeAlias = tuple[Params, Extra]


def makers(
    config: RunConfig, x: Experiment
) -> tuple[Callable[[], Weights], Callable[[Weights], TrainState]]:
    """Return functions that make the weights of the seed, and the initial state of weights."""
    keys = lambda: jax.random.split(jax.random.key(config.seed))  # for the weights, for the run
    weights = lambda: _drawn(x.init, keys()[0]) if callable(x.init) else x.init

    def state(weights: Weights) -> TrainState:
        if x.adapter is not None:
            weights = x.adapter.attach(weights, jax.random.fold_in(keys()[0], 1))
        params, extra = weights
        if x.init_extra is not None:
            with user_code("init_extra"):
                extra = x.init_extra(params, extra, x.train.size)
        return new_state(params, x.transformation, keys()[1], extra, scale=config.precision.scale())

    return weights, state


def with_shardings(tree: Tree, shardings: Any) -> Tree:
    """Return the shapes and dtypes of a tree with these shardings."""
    like = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(like, tree, shardings)


def _drawn(init: Callable[[Key], Weights], key: Key) -> Weights:
    """Return the parameters and what is carried beside them, as `init` makes them of a key."""
    with user_code("init"):
        made = init(key)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise LossError(
                f"init returns (params, extra), and this one returned a {type(made).__name__}. "
                f"Write: return params, ()"
            )
    check_trainable(made[0])
    return made


def shapes(batches: Any, *, parts: int = 1, part: tuple[int, int] | None = None) -> Batch:
    """Return the shapes and dtypes of a batch, or of one of `parts` slices of it.

    Args:
        part: index and number of the shard of rows that is read to find the shapes
            (`Strategy.part`); by default this process's of all processes.

    Raises:
        DataError: if an array of the batch is a number, which no row has.
    """
    own = batches.shard(*part or (jax.process_index(), jax.process_count()))
    return batch_shapes(own[0], batches.size // parts)


def batch_shapes(batch: Batch, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a batch of this kind with so many rows.

    Raises:
        DataError: if an array of the batch is a number, which no row has.
    """
    for name, array in batch.items():
        if not array.shape:
            raise DataError(
                f"`{name}` of a batch is one number, and every array has a value for each row: "
                f"repeat it by `np.full(rows, {name})`."
            )
    of = lambda array: jax.ShapeDtypeStruct(
        (rows, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype)
    )
    return {name: of(array) for name, array in batch.items()}
