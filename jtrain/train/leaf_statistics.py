"""Leaf statistics: the effect of a step on each leaf of the parameters, and their log."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.loop import Hook
from jtrain.core.pytree import at_least_f32, named_leaves, norm
from jtrain.core.state import TrainState
from jtrain.core.step import make_step
from jtrain.core.types import Batch, Metrics, Params
from jtrain.io.jsonl import JsonlWriter
from jtrain.parallel.offload import to_device
from jtrain.train.setup import TrainSetup

Statistics: TypeAlias = dict[str, dict[str, Any]]  # numbers by kind and leaf
KINDS = ("grad_norm", "grad_max", "update_norm", "param_norm", "ratio")


class LeafStatistics:
    """Statistics of the next step of a state, by leaf, computed in a program of their own.

    The program is the step with an optimizer that also records its inputs and updates. The gradient
    is therefore that of the whole batch, before clipping, for any layout. The training step is
    unchanged, and costs the same.
    """

    def __init__(self, setup: TrainSetup):
        self._setup = setup
        self._program: Callable[[TrainState, Batch], Statistics] | None = None

    def __call__(self, step: int, state: TrainState) -> dict[str, dict[str, float]]:
        """Return numbers by kind and leaf for step `step + 1`; NaN if its gradient is not finite.

        Compiles at the first call. The kinds: `grad_norm`, the gradient's 2-norm; `grad_max`, its
        largest absolute value; `update_norm` and `param_norm`; `ratio`, the one over the other.
        """
        setup = self._setup
        batch = setup.strategy.place(setup.train[step])
        if self._program is None:
            looks = make_statistics(setup)
            self._program = setup.strategy.compile(looks, setup.like, batch)
        found = jax.device_get(self._program(state, batch))
        return {kind: {leaf: float(x) for leaf, x in found[kind].items()} for kind in KINDS}


class LeafLog(Hook):
    """Hook that writes a row after steps `every`, 2 `every`, ...

    A row is `{"step": 100, "grad_norm": {"w": 0.5}, ...}`.

    Args:
        path: the file, None to write none; recreated unless the run resumes.
        every: steps.
        stop: the last step of the run, after which no row is written.
        look: `(step, state) -> statistics`, numbers by kind and leaf.
        resumed_at: as `MetricsFile` takes it.
    """

    settles = True  # so that its time is not counted for the steps before it

    def __init__(
        self,
        path: Path | str | None,
        *,
        every: int,
        stop: int,
        look: Callable[[int, Any], Mapping[str, Mapping[str, float]]],
        resumed_at: int | None = None,
    ):
        self.every, self._stop, self._look = every, stop, look
        self.rows = None if path is None else JsonlWriter(path, resumed_at=resumed_at)
        """The file."""

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Write a row."""
        if step < self._stop:
            statistics = self._look(step, state)
            if self.rows is not None:
                self.rows.append({"step": step, **statistics})

    def close(self) -> None:
        """Close the file."""
        if self.rows is not None:
            self.rows.close()


def build_leaf_log(
    setup: TrainSetup,
    path: Path | None,
    pause: Callable[[str], AbstractContextManager[None]],
    start: int | None,
) -> LeafLog:
    """Return the hook that writes the statistics of a run; close it at the end.

    Args:
        path: the file; None to compute and write nothing, as all processes but the first do.
        pause: context manager for work beside training.
        start: the step that the run resumes from, if it does.
    """
    measure = LeafStatistics(setup)

    def look(step: int, state: TrainState) -> dict[str, dict[str, float]]:
        with pause("looking at leaves"):
            return measure(step, state)

    config = setup.config
    return LeafLog(
        path,
        every=config.log.leaves,
        stop=config.steps,
        look=look,
        resumed_at=start,
    )


def make_statistics(setup: TrainSetup) -> Callable[[TrainState, Batch], Statistics]:
    """Return `(state, batch) -> statistics`, pure."""
    x = setup.experiment
    step = make_step(
        setup.loss,
        _recording(x.transformation),
        microbatches=setup.config.microbatches,
        couples=x.couples,
        psum=setup.strategy.psum,
        ragged=x.train.ragged,
    )

    def look(state: TrainState, batch: Batch) -> Statistics:
        state = to_device(state, setup.like)
        unknown = jax.tree.map(lambda _: jnp.float32(jnp.nan), _empty(state.params))
        watched = dataclasses.replace(state, opt_state=(state.opt_state, unknown))
        after, _ = step(watched, batch)
        opt_state: Any = after.opt_state
        return opt_state[1]

    return look


def leaf_statistics(grads: Params, updates: Params, params: Params) -> Statistics:
    """Return numbers by kind and leaf, in float32."""
    found: Statistics = {kind: {} for kind in KINDS}
    leaves = zip(*(named_leaves(tree).items() for tree in (grads, updates, params)), strict=True)
    for (name, grad), (_, update), (_, param) in leaves:
        param_norm, update_norm = norm(param), norm(update)
        found["grad_norm"][name] = norm(grad)
        found["grad_max"][name] = jnp.max(jnp.abs(at_least_f32(grad)), initial=0.0)
        nonzero = param_norm > 0
        found["update_norm"][name] = update_norm
        found["param_norm"][name] = param_norm
        found["ratio"][name] = jnp.where(
            nonzero, update_norm / jnp.where(nonzero, param_norm, 1), jnp.nan
        )
    return jax.tree.map(lambda x: x.astype(jnp.float32), found)


def _recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with the statistics of its gradients and updates beside its state."""
    inner = with_named_arguments(optimizer)

    def init(params: Any) -> Any:
        return inner.init(params), _empty(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        result, after = inner.update(updates, state[0], params, **extra_args)
        return result, (after, leaf_statistics(updates, result, params))

    return optax.GradientTransformationExtraArgs(init, update)


def _empty(params: Params) -> Statistics:
    return {kind: dict.fromkeys(named_leaves(params), 0.0) for kind in KINDS}
