"""A call of several steps: one program takes as many as its batches say are live."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Batch, Metrics
from jtrain.data.batches.step_batches import aligned_zeros

LIVE = "live_steps"  # bool k b: whether a call takes the step at an index


def repeat_step(step: StepFn) -> StepFn:
    """Return `(state, batches) -> (state, metrics)`: the live steps of batches stacked k b ...

    The metrics are stacked k ..., zero behind the last live step. The number of live steps is an
    argument, so that one program takes calls of every length to the same bits.
    """
    one = jax.jit(step, inline=True)  # traced once, for its shapes and for the loop

    def call(state: TrainState, batches: Batch) -> tuple[TrainState, Metrics]:
        arrays = {name: x for name, x in batches.items() if name != LIVE}
        at = lambda i: {name: x[i] for name, x in arrays.items()}
        shapes = jax.eval_shape(one, state, at(0))[1]
        longest = len(batches[LIVE])
        zeros = jax.tree.map(lambda x: jnp.zeros((longest, *x.shape), x.dtype), shapes)

        def body(i: Any, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            state, metrics = carry
            state, new = one(state, at(i))
            return state, jax.tree.map(lambda all_steps, x: all_steps.at[i].set(x), metrics, new)

        count = batches[LIVE].any(axis=1).sum(dtype=jnp.int32)
        return jax.lax.fori_loop(0, count, body, (state, zeros))

    return call


def mark_live(batches: Mapping[str, Any], longest: int) -> Batch:
    """Return batches stacked k b ..., padded to `longest` steps, with the array `LIVE`."""
    count, rows = next(iter(batches.values())).shape[:2]

    def pad(x: np.ndarray) -> np.ndarray:
        if len(x) == longest:
            return x
        padded = aligned_zeros((longest, *x.shape[1:]), x.dtype)
        padded[: len(x)] = x
        return padded

    return {**{name: pad(x) for name, x in batches.items()}, LIVE: _live(longest, count, rows)}


@functools.cache
def _live(longest: int, count: int, rows: int) -> np.ndarray:
    """Return the same read-only array for the same numbers: it is put on the devices once."""
    live = np.repeat(np.arange(longest)[:, None] < count, rows, axis=1)
    live.setflags(write=False)
    return live
