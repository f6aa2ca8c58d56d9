"""State before the first step: drawn, given, or started from stored weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.checkpoint import WeightsPlan, plan_weights
from jtrain.core.state import TrainState
from jtrain.parallel.offload import device_shardings
from jtrain.parallel.program_cache import load_or_compile
from jtrain.train.experiment import Experiment, RunConfig, Weights, makers
from jtrain.train.run_record import find_owner


def make_initial_state(
    config: RunConfig,
    experiment: Experiment,
    like: TrainState,
    initial: Weights,
    stored: WeightsPlan | None,
) -> TrainState:
    """Return the state before the first step, made straight into the shardings of `like`.

    Args:
        initial: shapes of the weights that `init` makes, without an adapter and the loss's state.
        stored: the weights that replace some or all of them.
    """
    to = shardings_of(like)
    weights, state = makers(config, experiment)
    if stored is not None:
        drawn = jax.jit(weights, out_shardings=shardings_of(initial))
        read = stored.read(initial if stored.covers(*initial) else drawn())
        # Weights that are stored in fewer bits have no buffer to lie in.
        fewer = experiment.adapter and experiment.adapter.settings.frozen != "as_is"
        return jax.jit(state, out_shardings=to, donate_argnums=() if fewer else 0)(read)
    given = experiment.init
    if callable(given):
        return load_or_compile(jax.jit(lambda: state(weights()), out_shardings=to).lower(), like)()
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
    return plan_weights(asked, *initial, find_owner) if asked.path else None


def shardings_of(like: Any) -> Any:
    """Return the sharding of each leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, like)
