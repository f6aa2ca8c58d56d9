"""A step taken apart: the loss of a whole batch on one device, and its gradient."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.core.loss import LossOutput, combine, normalize_loss
from jtrain.core.pytree import norm
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Key, Leaf, Params
from jtrain.data.batches.skip import SkipBatches
from jtrain.distributed.cluster import detect
from jtrain.errors import ConfigError
from jtrain.parallel import Single
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import TrainSetup, set_up


class StepGradient(NamedTuple):
    """What a step computes before its update."""

    loss: Leaf  # f32 scalar
    grads: Params
    grad_norm: Leaf  # f32 scalar
    returned: LossOutput


def on_one_device(config: RunConfig) -> RunConfig:
    """The same values, one step a call on one device: the same numbers but for rounding.

    Raises:
        ConfigError: in several processes.
    """
    cluster = detect(os.environ)
    if cluster.processes > 1:
        raise ConfigError(
            f"a run is looked into in one process, and here are {cluster.processes} "
            f"({cluster.spelt}). Type the same command without `jtrain launch`."
        )
    return dataclasses.replace(config, parallel=Single(), steps_per_call=1)


def alone(config: RunConfig) -> TrainSetup:
    """The parts of a run on one device, one step a call."""
    return set_up(on_one_device(config))


def slope_of(parts: TrainSetup) -> Callable[..., StepGradient]:
    """`(state, batch, weights=None) -> StepGradient`, pure and not compiled.

    All rows at once, for microbatches change no result. `weights` are what the terms are divided
    by, None for those of the batch itself.
    """
    terms = _terms(parts)

    def slope(state: TrainState, batch: Batch, weights: Any = None) -> StepGradient:
        rng = state.step_key()

        def share(params: Params) -> tuple[Leaf, LossOutput]:
            got = terms(params, state.extra, batch, rng)
            known = [mean.weight for mean in got.terms.means] if weights is None else weights
            return state.scale.up(combine(got.terms, known)), got

        (value, returned), grads = jax.value_and_grad(share, has_aux=True)(state.params)
        grads = state.scale.down(grads)
        return StepGradient(state.scale.down(value), grads, norm(grads), returned)

    return slope


def weights_of(parts: TrainSetup, state: TrainState, batch: Batch) -> list[Leaf]:
    """What each term of the loss is divided by in this batch."""
    got = _terms(parts)(state.params, state.extra, batch, state.step_key())
    return [mean.weight for mean in got.terms.means]


def loss_of(parts: TrainSetup, state: TrainState, batch: Batch, rng: Key | None) -> Leaf:
    """The loss of a batch; `rng` None as it is evaluated."""
    got = _terms(parts)(state.params, state.extra, batch, rng)
    return combine(got.terms, [mean.weight for mean in got.terms.means])


def whole_batch(parts: TrainSetup, step: int) -> dict[str, jax.Array]:
    """The batch that step `step` takes, the first being 1."""
    return on_device(SkipBatches(parts.experiment.train, parts.windows)[step - 1])


def on_device(batch: Batch) -> dict[str, jax.Array]:
    """A batch as JAX's arrays."""
    return {name: jnp.asarray(array) for name, array in batch.items()}


def _terms(parts: TrainSetup) -> Callable[..., LossOutput]:
    # Without its jit, which is inlined where it is called, and with it the lines of the loss.
    return inspect.unwrap(normalize_loss(parts.loss, ragged=parts.experiment.train.ragged))
