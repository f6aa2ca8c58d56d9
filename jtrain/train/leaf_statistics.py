"""Leaf statistics: the effect of a step on each leaf of the parameters, and their log."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.loop import Hook
from jtrain.core.pytree import at_least_f32, named_leaves, norm
from jtrain.core.state import TrainState
from jtrain.core.step import make_step
from jtrain.core.types import Params
from jtrain.data.batches.step_batches import SkipBatches
from jtrain.io.jsonl import JsonlWriter
from jtrain.parallel.offload import to_device
from jtrain.train.program import Program

Statistics: TypeAlias = dict[str, dict[str, Any]]  # numbers by kind and leaf

KINDS: Mapping[str, Callable[..., Any]] = {
    "grad_norm": lambda grad, update, param: norm(grad),
    "grad_max": lambda grad, update, param: jnp.max(jnp.abs(at_least_f32(grad)), initial=0.0),
    "update_norm": lambda grad, update, param: norm(update),
    "param_norm": lambda grad, update, param: norm(param),
    "ratio": lambda grad, update, param: (
        norm(update) / jnp.where(norm(param) > 0, norm(param), jnp.nan)
    ),
}
"""Statistics of a leaf: the gradient's 2-norm and its largest absolute value, the norms of update
and parameter, and the one over the other."""


class LeafStatistics:
    """Statistics of the next step of a state, by leaf, computed in a program of their own.

    The program is the step with an optimizer that also records its inputs and updates. The gradient
    is therefore that of the whole batch, before clipping, for any layout. The training step is
    unchanged, and costs the same.
    """

    def __init__(self, program: Program, train: SkipBatches | None = None):
        self._program, self._train = program, train or program.batches().train
        self._compiled: Callable[..., Statistics] | None = None

    def __call__(self, step: int, state: TrainState) -> dict[str, dict[str, float]]:
        """Return numbers by kind and leaf for step `step + 1`; NaN if its gradient is not finite.

        Compiles at the first call.
        """
        resolved = self._program.resolved
        batch = resolved.strategy.place(self._train[step])
        if self._compiled is None:
            statistics = _make_statistics(self._program)
            self._compiled = resolved.strategy.compile(statistics, resolved.abstract_state, batch)
        found = jax.device_get(self._compiled(state, batch))
        return {kind: {leaf: float(x) for leaf, x in found[kind].items()} for kind in KINDS}


class LeafLog(Hook):
    """Hook that writes the statistics after steps `every`, 2 `every`, ..., but not after the last.

    A row is `{"step": 100, "grad_norm": {"w": 0.5}, ...}`.

    Args:
        rows: the file; None to compute and write nothing, as all processes but the first do.
        pause: context manager for work beside training.
        train: batch of each step.
    """

    def __init__(
        self,
        program: Program,
        rows: JsonlWriter | None,
        pause: Callable[[str], AbstractContextManager[None]],
        train: SkipBatches,
    ):
        self.every, self._stop = program.resolved.config.log.leaves, program.resolved.config.steps
        self._measure, self._pause = LeafStatistics(program, train), pause
        self.rows = rows

    def on_state(self, step: int, state: Any) -> None:
        """Write a row."""
        if step == self._stop:
            return
        with self._pause("looking at leaves"):
            statistics = self._measure(step, state)
        if self.rows is not None:
            self.rows.append({"step": step, **statistics})


def _make_statistics(program: Program) -> Callable[..., Statistics]:
    """Return `(state, batch) -> statistics`, pure."""
    x = program.resolved.experiment
    inner = with_named_arguments(x.transformation)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        result, after = inner.update(updates, state[0], params, **extra_args)
        return result, (after, leaf_statistics(updates, result, params))

    step = make_step(
        program.loss,
        optax.GradientTransformationExtraArgs(inner.init, update),
        microbatches=program.resolved.config.microbatches,
        rows_interact=x.rows_interact,
        psum=program.resolved.strategy.psum,
        ragged=x.train.ragged,
    )

    def statistics(state: TrainState, batch: Any) -> Statistics:
        state = to_device(state, program.resolved.abstract_state)
        unknown = dict.fromkeys(named_leaves(state.params), jnp.float32(jnp.nan))
        recorded = (state.opt_state, dict.fromkeys(KINDS, unknown))
        after, _ = step(dataclasses.replace(state, opt_state=recorded), batch)
        opt_state: Any = after.opt_state
        return opt_state[1]

    return statistics


def leaf_statistics(grads: Params, updates: Params, params: Params) -> Statistics:
    """Return numbers by kind and leaf, in float32."""
    trees = [named_leaves(tree) for tree in (grads, updates, params)]
    return {
        kind: {leaf: fn(*(tree[leaf] for tree in trees)).astype(jnp.float32) for leaf in trees[0]}
        for kind, fn in KINDS.items()
    }
