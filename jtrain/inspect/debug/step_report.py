"""Report of a step: without jit, with checks, and leaf by leaf."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
from jax.experimental import checkify

from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Leaf
from jtrain.inspect.debug.single_device_step import (
    make_gradient,
    read_full_batch,
    set_up_single_device,
)
from jtrain.train.experiment import RunConfig
from jtrain.train.leaf_statistics import LeafStatistics
from jtrain.train.setup import TrainSetup


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The numbers of a step on one device with all rows at once, without jit and with checks."""

    eager_loss: float
    eager_grad_norm: float
    """Both computed one operation at a time, without the compiler."""
    checks: str
    """Error of checkify: the first nonfinite value, division by zero or index out of bounds in loss
    or gradient; empty if there is none."""
    leaves: Mapping[str, Mapping[str, float]]
    """Statistics by kind and leaf; see `LeafStatistics`."""


def dissect(
    config: RunConfig, state: TrainState, step: int, log: Callable[[str], None]
) -> StepReport:
    """Return the report of step `step`.

    Args:
        state: the state before the step, or before the call with the step; the steps between are
            then run one by one.
        log: called with a line about progress.
    """
    setup = set_up_single_device(config)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.like)
    state = _advance(setup, jax.device_put(jax.device_get(state), shardings), step)
    batch = read_full_batch(setup, step)
    log("the same step without jit, and with checks")
    with jax.disable_jit():
        gradient = make_gradient(setup)(state, batch)
    return StepReport(
        eager_loss=float(gradient.loss),
        eager_grad_norm=float(gradient.grad_norm),
        checks=_checks(setup, state, batch),
        leaves=LeafStatistics(setup)(step - 1, state),
    )


def _advance(setup: TrainSetup, state: TrainState, step: int) -> TrainState:
    if int(state.step) == step - 1:
        return state
    program = setup.compile_step()
    for number in range(int(state.step), step - 1):
        state, _ = program(state, setup.place(setup.calls[number]))
    return state


def _checks(setup: TrainSetup, state: TrainState, batch: Batch) -> str:
    """Return the error of checkify, or why it cannot check: it does not support all primitives."""

    def numbers(state: TrainState, batch: Batch) -> tuple[Leaf, Leaf]:
        gradient = make_gradient(setup)(state, batch)
        return gradient.loss, gradient.grad_norm

    checked = checkify.checkify(numbers, errors=checkify.all_checks)
    try:
        error, _ = jax.jit(checked)(state, batch)
    except NotImplementedError as unknown:
        return f"checkify cannot check this step: {unknown}"
    return error.get() or ""
