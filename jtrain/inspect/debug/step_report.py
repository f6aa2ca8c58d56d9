"""One step of a run looked at from all sides: without jit, with checks, leaf by leaf."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
from jax.experimental import checkify

from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Leaf
from jtrain.inspect.debug.single_device_step import alone, slope_of, whole_batch
from jtrain.train.experiment import RunConfig
from jtrain.train.leaf_statistics import LeafStatistics
from jtrain.train.setup import TrainSetup


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What a step is when it is taken in other ways, all rows at once on one device."""

    eager_loss: float
    eager_grad_norm: float
    """Both one operation at a time, without the compiler."""
    checks: str
    """What checkify says: the first value that is not finite, division by zero or index out of
    bounds in loss or gradient; empty if there is none."""
    leaves: Mapping[str, Mapping[str, float]]
    """By kind and leaf; see `LeafStatistics`."""


def dissect(
    config: RunConfig, state: TrainState, step: int, tell: Callable[[str], None]
) -> StepReport:
    """That of step `step`.

    Args:
        state: before the step, or before the call that has it: then the steps between are taken,
            one step a call.
        tell: takes a line about what is being done.
    """
    parts = alone(config)
    to = jax.tree.map(lambda leaf: leaf.sharding, parts.like)
    state = _up_to(parts, jax.device_put(jax.device_get(state), to), step)
    batch = whole_batch(parts, step)
    tell("the same step without jit, and with checks")
    with jax.disable_jit():
        slope = slope_of(parts)(state, batch)
    return StepReport(
        eager_loss=float(slope.loss),
        eager_grad_norm=float(slope.grad_norm),
        checks=_checks(parts, state, batch),
        leaves=LeafStatistics(parts)(step - 1, state),
    )


def _up_to(parts: TrainSetup, state: TrainState, step: int) -> TrainState:
    if int(state.step) == step - 1:
        return state
    program = parts.compile_step()
    for number in range(int(state.step), step - 1):
        state, _ = program(state, parts.place(parts.calls[number]))
    return state


def _checks(parts: TrainSetup, state: TrainState, batch: Batch) -> str:
    """What checkify finds, or why it cannot look: it does not know every primitive."""

    def numbers(state: TrainState, batch: Batch) -> tuple[Leaf, Leaf]:
        slope = slope_of(parts)(state, batch)
        return slope.loss, slope.grad_norm

    checked = checkify.checkify(numbers, errors=checkify.all_checks)
    try:
        error, _ = jax.jit(checked)(state, batch)
    except NotImplementedError as unknown:
        return f"checkify cannot look: {unknown}"
    return error.get() or ""
