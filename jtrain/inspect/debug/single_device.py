"""Steps of a run on one device: the batch as a whole, and without jit."""

import contextlib
import dataclasses
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.finite import is_finite_update, update_if
from jtrain.core.gradient import LossGradient, make_value_fn
from jtrain.core.loss import LossOutput, combine, normalize_loss, update_extra
from jtrain.core.pytree import conjugate, norm
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Key, Leaf, Params
from jtrain.distributed.cluster import detect
from jtrain.errors import CodeError, ConfigError, LossError
from jtrain.io.formatting import format_number
from jtrain.parallel import Single
from jtrain.train.experiment import RunConfig
from jtrain.train.program import Program, set_up


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


def set_up_single_device(config: RunConfig) -> Program:
    """Set up a run on one device, with one step per call."""
    return set_up(to_single_device(config))


def move_state(state: TrainState, program: Program) -> TrainState:
    """Return a state on the devices of a program."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.resolved.abstract_state)
    return jax.device_put(jax.device_get(state), shardings)


def make_gradient(program: Program) -> Callable[..., StepGradient]:
    """Return `(state, batch, weights=None) -> StepGradient`, pure and not compiled.

    All rows are computed at once, since microbatches change no result. The terms are divided by
    `weights`; None: by the weights of the batch itself.
    """
    terms = loss_terms(program)

    def gradient(state: TrainState, batch: Batch, weights: Any = None) -> StepGradient:
        rng = state.step_key()

        def weighted_loss(params: Params) -> tuple[Leaf, LossOutput]:
            output = terms(params, state.extra, batch, rng)
            return state.scale.up(combine(output.terms, weights)), output

        (value, returned), grads = jax.value_and_grad(weighted_loss, has_aux=True)(state.params)
        grads = state.scale.down(conjugate(grads))
        return StepGradient(state.scale.down(value), grads, norm(grads), returned)

    return gradient


def term_weights(program: Program, state: TrainState, batch: Batch) -> list[Leaf]:
    """Return the weight of each term of the loss in this batch."""
    output = loss_terms(program)(state.params, state.extra, batch, state.step_key())
    return [mean.weight for mean in output.terms.means]


def compute_loss(program: Program, state: TrainState, batch: Batch, rng: Key | None) -> Leaf:
    """Return the loss of a batch; `rng` is None in evaluation."""
    output = loss_terms(program)(state.params, state.extra, batch, rng)
    return combine(output.terms)


def read_full_batch(program: Program, step: int) -> dict[str, jax.Array]:
    """Return the batch of step `step`, counted from 1, with the rows of all processes."""
    return to_device(program.resolved.train(own_rows=False)[step - 1])


def to_device(batch: Batch) -> dict[str, jax.Array]:
    """Return a batch as JAX arrays."""
    return {name: jnp.asarray(array) for name, array in batch.items()}


def loss_terms(program: Program) -> Callable[..., LossOutput]:
    """Return `(params, extra, batch, rng) -> LossOutput`, whose operations have their lines."""
    # Without jit: an inlined call would lose the source lines of the loss.
    return inspect.unwrap(
        normalize_loss(program.loss, ragged=program.resolved.experiment.train.ragged)
    )


def run_eager(config: RunConfig, *, log: Callable[[str], None]) -> None:
    """Train without jit on one device. Nothing is written.

    Each step calls the loss twice. The first call is plain Python over concrete arrays, in which
    breakpoints stop and prints print. The second call takes the gradient, and is silent. At the end
    the loss of one batch of each evaluation set is computed.

    Raises:
        LossError: if the loss converts a value that depends on parameters to a Python number.
    """
    program = set_up_single_device(config)
    state, steps = program.initial_state(), program.resolved.config.steps
    with jax.disable_jit():
        for step in range(1, steps + 1):
            batch, stage = read_full_batch(program, step), program.at(step - 1)
            compute_loss(stage, state, batch, state.step_key())
            with _silence():
                gradient = _gradient(stage, state, batch)
                state = _updated_state(stage, state, batch, gradient)
            loss, norm = (format_number(float(x)) for x in (gradient.loss, gradient.grad_norm))
            log(f"step {step}/{steps}  loss {loss}  gradient norm {norm}")
        for name, rows in program.resolved.sets.items():
            batch = to_device(rows[0])
            loss = compute_loss(program, state, batch, None)
            log(f"{name}  loss of the first batch {format_number(float(loss))}")


def _gradient(program: Program, state: TrainState, batch: Batch) -> StepGradient:
    try:
        return make_gradient(program)(state, batch)
    except CodeError as error:
        if not isinstance(error.__context__, jax.errors.ConcretizationTypeError):
            raise
        raise LossError(
            f"the gradient of the loss cannot be taken: the loss converts a value that depends on "
            f"parameters to a Python number, by float(x) or int(x). To print a value write "
            f"x.item(), or float(jax.lax.stop_gradient(x)). "
            f"({str(error.__context__).splitlines()[0]})"
        ) from error


def _updated_state(
    program: Program, state: TrainState, batch: Batch, gradient: StepGradient
) -> TrainState:
    """Return the state after the update; unchanged if loss or gradient is not finite.

    core's step traces the loss to shapes first, so that no value in it could be printed.
    """
    update = with_named_arguments(program.resolved.experiment.transformation).update
    extra = update_extra(state.extra, gradient.returned.extra)
    forward = jnp.isfinite(gradient.loss) & is_finite_update(extra, gradient.returned.extra)
    finite = forward & jnp.isfinite(gradient.grad_norm)

    def gradient_at(params: Params) -> LossGradient:
        found = make_gradient(program)(dataclasses.replace(state, params=params), batch)
        return LossGradient(found.loss, found.grads, {}, ())

    kwargs = {
        "value": gradient.loss,
        "grad": gradient.grads,
        "value_fn": make_value_fn(gradient_at),
        "grad_fn": lambda params, *index: gradient_at(params).grads,
        "grad_norm": gradient.grad_norm,
    }
    old = state.opt_state, state.params, state.extra
    taken = update_if(finite, update, gradient.grads, *old, extra, **kwargs)
    return dataclasses.replace(
        state,
        step=state.step + 1,
        skipped=state.skipped + ~finite,
        scale=state.scale.after(finite, overflow=forward & ~finite),
        params=taken.params,
        opt_state=taken.opt_state,
        extra=taken.extra,
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress prints and breakpoints."""
    before, sys.breakpointhook = sys.breakpointhook, lambda *args, **kwargs: None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.breakpointhook = before
