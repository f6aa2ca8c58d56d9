"""Steps without jit: what is printed in a loss has numbers in it, and breakpoints stop there."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax

from jtrain.core.finite import is_finite_update, update_if
from jtrain.core.gradient import LossGradient, make_value_fn
from jtrain.core.loss import update_extra
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Params
from jtrain.errors import CodeError, LossError
from jtrain.inspect.debug.single_device_step import (
    StepGradient,
    alone,
    loss_of,
    on_device,
    slope_of,
    whole_batch,
)
from jtrain.io.formatting import number
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import TrainSetup


def eager(config: RunConfig, *, tell: Callable[[str], None]) -> list[float]:
    """The loss of each step, taken without jit on one device; nothing is written.

    Each step calls the loss twice. The first call is plain Python over arrays that hold numbers:
    there breakpoints stop and prints print. The second takes the gradient, and is silent. At the
    end each evaluation set gives one batch, as it is evaluated.

    Args:
        tell: takes a line after each step.

    Raises:
        LossError: if the loss makes a Python number of what depends on parameters.
    """
    parts, losses = alone(config), []
    state, steps = parts.fresh(), parts.config.steps
    with jax.disable_jit():
        for step in range(1, steps + 1):
            batch = whole_batch(parts, step)
            loss_of(parts, state, batch, state.step_key())
            with _quietly():
                slope = _slope(parts, state, batch)
                state = _after(parts, state, batch, slope)
            losses.append(float(slope.loss))
            norm = number(float(slope.grad_norm))
            tell(f"step {step}/{steps}  loss {number(losses[-1])}  gradient norm {norm}")
        for name, rows in parts.sets.items():
            batch = on_device(rows[0])
            found = loss_of(parts, state, batch, None)
            tell(f"{name}  loss of the first batch {number(float(found))}")
    return losses


def _slope(parts: TrainSetup, state: TrainState, batch: Batch) -> StepGradient:
    try:
        return slope_of(parts)(state, batch)
    except CodeError as error:
        if not isinstance(error.__context__, jax.errors.ConcretizationTypeError):
            raise
        raise LossError(
            "the gradient of the loss cannot be taken: the loss makes a Python number of what "
            "depends on parameters, by float(x) or int(x). To look at a value write x.item(), or "
            f"float(jax.lax.stop_gradient(x)). ({str(error.__context__).splitlines()[0]})"
        ) from error


def _after(parts: TrainSetup, state: TrainState, batch: Batch, slope: StepGradient) -> TrainState:
    """The state after the update, or as it was where loss or gradient is not finite."""
    update = optax.with_extra_args_support(parts.experiment.transformation).update
    extra = update_extra(state.extra, slope.returned.extra)
    forward = jnp.isfinite(slope.loss) & is_finite_update(extra, slope.returned.extra)
    finite = forward & jnp.isfinite(slope.grad_norm)

    def gradient(params: Params) -> LossGradient:
        found = slope_of(parts)(dataclasses.replace(state, params=params), batch)
        return LossGradient(found.loss, found.grads, {}, ())

    known = {"value": slope.loss, "grad": slope.grads, "value_fn": make_value_fn(gradient)}
    known |= {"grad_norm": slope.grad_norm}
    old = state.opt_state, state.params, state.extra
    taken = update_if(finite, update, slope.grads, *old, extra, **known)
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
def _quietly() -> Iterator[None]:
    """Neither prints nor stops at breakpoints."""
    before, sys.breakpointhook = sys.breakpointhook, lambda *args, **kwargs: None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.breakpointhook = before
