"""State before the first step, and its shapes: drawn, given, or started from stored weights."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jtrain.checkpoint import WeightsPlan, plan_weights
from jtrain.core.state import TrainState, new_state
from jtrain.core.types import Extra, Key, Params, Tree
from jtrain.errors import LossError
from jtrain.errors.user_code import user_code
from jtrain.parallel import Strategy
from jtrain.parallel.offload import device_shardings
from jtrain.parallel.program_cache import load_or_compile
from jtrain.train.experiment import Experiment, RunConfig
from jtrain.train.fit_arguments import check_trainable
from jtrain.train.run_dir import RunDir

Weights: TypeAlias = tuple[Params, Extra]


def make_initial_state(
    config: RunConfig,
    experiment: Experiment,
    abstract_state: TrainState,
    initial: Weights,
    stored: WeightsPlan | None,
) -> TrainState:
    """Return the state before the first step, made straight into the shardings of `abstract_state`.

    Args:
        initial: shapes of the weights that `init` makes, without an adapter and the loss's state.
        stored: the weights that replace some or all of them.
    """
    to = shardings_of(abstract_state)
    weights, state = makers(config, experiment)
    if stored is not None:
        drawn = jax.jit(weights, out_shardings=shardings_of(initial))
        read = stored.read(initial if stored.covers(*initial) else drawn())
        # Weights that are stored in fewer bits have no buffer to lie in.
        fewer = experiment.adapter and experiment.adapter.settings.frozen != "as_is"
        return jax.jit(state, out_shardings=to, donate_argnums=() if fewer else 0)(read)
    given = experiment.initial
    if callable(given):
        return load_or_compile(
            jax.jit(lambda: state(weights()), out_shardings=to).lower(), abstract_state
        )()
    # Copied, for the first step gives up its state, and who gave the weights may keep them.
    placed = jax.device_put(given, shardings_of(device_shardings(initial)))
    return jax.jit(lambda w: state(jax.tree.map(jnp.copy, w)), out_shardings=to)(placed)


def plan_initial_weights(config: RunConfig, initial: Weights) -> WeightsPlan | None:
    """Return the stored weights that a new state starts from; None if none are configured.

    Raises:
        UserError: if `init_from` names a missing file or one that does not fit.
    """
    asked = config.init_from
    if not asked.path:  # `model.from` names the source of values and weights
        path = getattr(getattr(config, "model", None), "pretrained", "")
        asked = dataclasses.replace(asked, path=path, extra=True)
    return plan_weights(asked, *initial, lambda path: RunDir(path).owner()) if asked.path else None


def shardings_of(abstract_state: Any) -> Any:
    """Return the sharding of each leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state)


def makers(
    config: RunConfig, x: Experiment
) -> tuple[Callable[[], Weights], Callable[[Weights], TrainState]]:
    """Return functions that make the weights of the seed, and the initial state of weights."""
    keys = lambda: jax.random.split(jax.random.key(config.seed))  # for the weights, for the run
    weights = lambda: _drawn(x.initial, keys()[0]) if callable(x.initial) else x.initial

    def state(weights: Weights) -> TrainState:
        if x.adapter is not None:
            weights = x.adapter.attach(weights, jax.random.fold_in(keys()[0], 1))
        params, extra = weights
        if x.init_extra is not None:
            with user_code("init_extra"):
                extra = x.init_extra(params, extra, x.train.size)
        return new_state(params, x.transformation, keys()[1], extra, scale=config.precision.scale())

    return weights, state


def trace_state(config: RunConfig, x: Experiment) -> TrainState:
    """Return the shapes and dtypes of the state before the first step."""
    weights, state = makers(config, x)
    return jax.eval_shape(lambda: state(weights()))


def trace_weights(
    config: RunConfig, x: Experiment, abstract_state: TrainState, strategy: Strategy
) -> Weights:
    """Return the weights that `init` makes, without an adapter and the loss's state, as shapes."""
    if x.adapter is None and x.init_extra is None:
        return abstract_state.params, abstract_state.extra
    params, extra = jax.eval_shape(makers(config, x)[0])
    state = dataclasses.replace(abstract_state, params=params, extra=extra)
    placed = with_shardings(state, strategy.shardings(state, x.dims))
    return placed.params, placed.extra


def with_shardings(tree: Tree, shardings: Any) -> Tree:
    """Return the shapes and dtypes of a tree with these shardings."""
    abstract_state = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(abstract_state, tree, shardings)


def _drawn(init: Callable[[Key], Weights], key: Key) -> Weights:
    with user_code("init"):
        made = init(key)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise LossError(
                f"init returns (params, extra), and this one returned a {type(made).__name__}. "
                f"Write: return params, ()"
            )
    check_trainable(made[0])
    return made
