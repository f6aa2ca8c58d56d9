"""Steps without jit, in which prints show numbers and breakpoints stop."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.finite import is_finite_update, update_if
from jtrain.core.gradient import LossGradient, make_value_fn
from jtrain.core.loss import update_extra
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Params
from jtrain.errors import CodeError, LossError
from jtrain.inspect.debug.single_device_step import (
    StepGradient,
    compute_loss,
    make_gradient,
    read_full_batch,
    set_up_single_device,
    to_device,
)
from jtrain.io.formatting import format_number
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import TrainSetup


def run_eager(config: RunConfig, *, log: Callable[[str], None]) -> list[float]:
    """Train without jit on one device; return the loss of each step. Nothing is written.

    Each step calls the loss twice. The first call is plain Python over concrete arrays, in which
    breakpoints stop and prints print. The second call takes the gradient, and is silent. At the end
    the loss of one batch of each evaluation set is computed.

    Args:
        log: called with a line after each step.

    Raises:
        LossError: if the loss converts a value that depends on parameters to a Python number.
    """
    setup, losses = set_up_single_device(config), []
    state, steps = setup.fresh(), setup.config.steps
    with jax.disable_jit():
        for step in range(1, steps + 1):
            batch = read_full_batch(setup, step)
            compute_loss(setup, state, batch, state.step_key())
            with _silence():
                gradient = _gradient(setup, state, batch)
                state = _updated_state(setup, state, batch, gradient)
            losses.append(float(gradient.loss))
            norm = format_number(float(gradient.grad_norm))
            log(f"step {step}/{steps}  loss {format_number(losses[-1])}  gradient norm {norm}")
        for name, rows in setup.sets.items():
            batch = to_device(rows[0])
            loss = compute_loss(setup, state, batch, None)
            log(f"{name}  loss of the first batch {format_number(float(loss))}")
    return losses


def _gradient(setup: TrainSetup, state: TrainState, batch: Batch) -> StepGradient:
    try:
        return make_gradient(setup)(state, batch)
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
    setup: TrainSetup, state: TrainState, batch: Batch, gradient: StepGradient
) -> TrainState:
    """Return the state after the update; unchanged if loss or gradient is not finite."""
    update = with_named_arguments(setup.experiment.transformation).update
    extra = update_extra(state.extra, gradient.returned.extra)
    forward = jnp.isfinite(gradient.loss) & is_finite_update(extra, gradient.returned.extra)
    finite = forward & jnp.isfinite(gradient.grad_norm)

    def gradient_at(params: Params) -> LossGradient:
        found = make_gradient(setup)(dataclasses.replace(state, params=params), batch)
        return LossGradient(found.loss, found.grads, {}, ())

    kwargs = {
        "value": gradient.loss,
        "grad": gradient.grads,
        "value_fn": make_value_fn(gradient_at),
        "grad_fn": lambda params, *index: gradient_at(params).grads,
    }
    kwargs |= {"grad_norm": gradient.grad_norm}
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
