"""What a step does to each leaf of the parameters, computed beside training."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jtrain.core.pytree import at_least_f32, named_leaves, norm
from jtrain.core.state import TrainState
from jtrain.core.step import make_step
from jtrain.core.types import Batch, Params
from jtrain.parallel.offload import to_device
from jtrain.train.hooks.leaf_log import LeafLog
from jtrain.train.setup import TrainSetup

Statistics: TypeAlias = dict[str, dict[str, Any]]  # of each kind, of each leaf a number
KINDS = ("grad_norm", "grad_max", "update_norm", "param_norm", "ratio")


class LeafStatistics:
    """Of a state, what the step that follows does to each leaf; a program beside the step's own.

    That program is the step itself with an optimizer that looks at what it is given: so the
    gradient is that of the whole batch, clipped by nothing yet, however it is split. The step that
    trains is not touched, and costs what it did.
    """

    def __init__(self, parts: TrainSetup):
        self._parts = parts
        self._program: Callable[[TrainState, Batch], Statistics] | None = None

    def __call__(self, step: int, state: TrainState) -> dict[str, dict[str, float]]:
        """By kind and leaf, what step `step + 1` does; NaN where its gradient is not finite.

        Compiles at the first call. The kinds: `grad_norm`, the gradient's 2-norm; `grad_max`, its
        largest absolute value; `update_norm` and `param_norm`; `ratio`, the one over the other.
        """
        parts = self._parts
        batch = parts.strategy.place(parts.train[step])
        if self._program is None:
            looks = looking(parts)
            self._program = parts.strategy.compile(looks, parts.like, batch)
        found = jax.device_get(self._program(state, batch))
        return {kind: {leaf: float(x) for leaf, x in found[kind].items()} for kind in KINDS}


def leaves(
    parts: TrainSetup,
    path: Path | None,
    pause: Callable[[str], AbstractContextManager[None]],
    start: int | None,
    lost: Callable[[str], object],
) -> LeafLog:
    """The hook that writes them for a run; close it at the end.

    Args:
        path: of the file; None to look and write nothing, as all processes but one do.
        pause: what is done beside training is done within.
        start: the step that the run goes on from, if it does.
        lost: as `Rows` takes it.
    """
    of = LeafStatistics(parts)

    def look(step: int, state: TrainState) -> dict[str, dict[str, float]]:
        with pause("looking at leaves"):
            return of(step, state)

    config = parts.config
    return LeafLog(
        path,
        every=config.log.leaves,
        stop=config.steps,
        look=look,
        resumed_at=start,
        lost=lost,
    )


def looking(parts: TrainSetup) -> Callable[[TrainState, Batch], Statistics]:
    """`(state, batch) -> statistics`, pure."""
    x = parts.experiment
    step = make_step(
        parts.loss,
        _watched(x.transformation),
        microbatches=parts.config.microbatches,
        couples=x.couples,
        psum=parts.strategy.psum,
        ragged=x.train.ragged,
    )

    def look(state: TrainState, batch: Batch) -> Statistics:
        state = to_device(state, parts.like)
        unknown = jax.tree.map(lambda _: jnp.float32(jnp.nan), _empty(state.params))
        watched = dataclasses.replace(state, opt_state=(state.opt_state, unknown))
        after, _ = step(watched, batch)
        opt_state: Any = after.opt_state
        return opt_state[1]

    return look


def statistics(grads: Params, updates: Params, params: Params) -> Statistics:
    """Of each leaf its numbers, in float32."""
    found: Statistics = {kind: {} for kind in KINDS}
    leaves = zip(*(named_leaves(tree).items() for tree in (grads, updates, params)), strict=True)
    for (name, grad), (_, update), (_, param) in leaves:
        held, moved = norm(param), norm(update)
        found["grad_norm"][name] = norm(grad)
        found["grad_max"][name] = jnp.max(jnp.abs(at_least_f32(grad)), initial=0.0)
        found["update_norm"][name] = moved
        found["param_norm"][name] = held
        found["ratio"][name] = jnp.where(held > 0, moved / jnp.where(held > 0, held, 1), jnp.nan)
    return jax.tree.map(lambda x: x.astype(jnp.float32), found)


def _watched(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with the statistics of what it was given and gave beside its state."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        return inner.init(params), _empty(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        taken, after = inner.update(updates, state[0], params, **extra_args)
        return taken, (after, statistics(updates, taken, params))

    return optax.GradientTransformationExtraArgs(init, update)


def _empty(params: Params) -> Statistics:
    return {kind: dict.fromkeys(named_leaves(params), 0.0) for kind in KINDS}
