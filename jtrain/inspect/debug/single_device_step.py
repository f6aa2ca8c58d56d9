"""The loss and the gradient of a full batch on one device."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.core.loss import LossOutput, combine, normalize_loss
from jtrain.core.pytree import conjugate, norm
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Key, Leaf, Params
from jtrain.data.batches.step_batches import SkipBatches
from jtrain.distributed.cluster import detect
from jtrain.errors import ConfigError
from jtrain.parallel import Single
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import TrainSetup, set_up


class StepGradient(NamedTuple):
    """Loss and gradient of a step."""

    loss: Leaf  # f32 scalar
    grads: Params
    grad_norm: Leaf  # f32 scalar
    returned: LossOutput


def to_single_device(config: RunConfig) -> RunConfig:
    """Return the config for one step per call on one device; its numbers differ by rounding only.

    Raises:
        ConfigError: in several processes.
    """
    cluster = detect(os.environ)
    if cluster.processes > 1:
        raise ConfigError(
            f"a run is debugged in one process, and this command has {cluster.processes} "
            f"({cluster.variables}). Type the same command without `jtrain launch`."
        )
    return dataclasses.replace(config, parallel=Single(), steps_per_call=1)


def set_up_single_device(config: RunConfig) -> TrainSetup:
    """Set up a run on one device, with one step per call."""
    return set_up(to_single_device(config))


def make_gradient(setup: TrainSetup) -> Callable[..., StepGradient]:
    """Return `(state, batch, weights=None) -> StepGradient`, pure and not compiled.

    All rows are computed at once, since microbatches change no result. The terms are divided by
    `weights`; None: by the weights of the batch itself.
    """
    terms = _terms(setup)

    def gradient(state: TrainState, batch: Batch, weights: Any = None) -> StepGradient:
        rng = state.step_key()

        def weighted_loss(params: Params) -> tuple[Leaf, LossOutput]:
            output = terms(params, state.extra, batch, rng)
            divisors = [mean.weight for mean in output.terms.means] if weights is None else weights
            return state.scale.up(combine(output.terms, divisors)), output

        (value, returned), grads = jax.value_and_grad(weighted_loss, has_aux=True)(state.params)
        grads = state.scale.down(conjugate(grads))
        return StepGradient(state.scale.down(value), grads, norm(grads), returned)

    return gradient


def term_weights(setup: TrainSetup, state: TrainState, batch: Batch) -> list[Leaf]:
    """Return the weight of each term of the loss in this batch."""
    output = _terms(setup)(state.params, state.extra, batch, state.step_key())
    return [mean.weight for mean in output.terms.means]


def compute_loss(setup: TrainSetup, state: TrainState, batch: Batch, rng: Key | None) -> Leaf:
    """Return the loss of a batch; `rng` is None in evaluation."""
    output = _terms(setup)(state.params, state.extra, batch, rng)
    return combine(output.terms, [mean.weight for mean in output.terms.means])


def read_full_batch(setup: TrainSetup, step: int) -> dict[str, jax.Array]:
    """Return the full batch of step `step`, counted from 1."""
    return to_device(SkipBatches(setup.experiment.train, setup.windows)[step - 1])


def to_device(batch: Batch) -> dict[str, jax.Array]:
    """Return a batch as JAX arrays."""
    return {name: jnp.asarray(array) for name, array in batch.items()}


def _terms(setup: TrainSetup) -> Callable[..., LossOutput]:
    # Without jit: an inlined call would lose the source lines of the loss.
    return inspect.unwrap(normalize_loss(setup.loss, ragged=setup.experiment.train.ragged))
