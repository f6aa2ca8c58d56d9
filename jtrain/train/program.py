"""Program of a call of several steps, its batches, and its metrics in one array."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.mean import Mean
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
        most = len(batches[LIVE])
        zeros = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes)

        def body(i: Any, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            state, metrics = carry
            state, new = one(state, at(i))
            return state, jax.tree.map(lambda all_steps, x: all_steps.at[i].set(x), metrics, new)

        count = batches[LIVE].any(axis=1).sum(dtype=jnp.int32)
        return jax.lax.fori_loop(0, count, body, (state, zeros))

    return call


def mark_live(batches: Mapping[str, Any], most: int) -> Batch:
    """Return batches stacked k b ..., padded to `most` steps, with the array `LIVE`."""
    count, rows = next(iter(batches.values())).shape[:2]

    def pad(x: np.ndarray) -> np.ndarray:
        if len(x) == most:
            return x
        padded = aligned_zeros((most, *x.shape[1:]), x.dtype)
        padded[: len(x)] = x
        return padded

    return {**{name: pad(x) for name, x in batches.items()}, LIVE: _live(most, count, rows)}


@functools.cache
def _live(most: int, count: int, rows: int) -> np.ndarray:
    """Return the same read-only array for the same numbers: it is put on the devices once."""
    live = np.repeat(np.arange(most)[:, None] < count, rows, axis=1)
    live.setflags(write=False)
    return live


@jax.tree_util.register_pytree_node_class
class PackedMetrics(Mapping[str, Mean]):
    """Scalar metrics as one array.

    Args:
        numbers: f32 ... 2n, the total and the weight of each metric in turn.
        names: of the n metrics.
    """

    __slots__ = ("names", "numbers")

    def __init__(self, numbers: Any, names: tuple[str, ...]):
        self.numbers, self.names = numbers, names

    def __getitem__(self, name: str) -> Mean:
        if name not in self.names:
            raise KeyError(name)
        at = 2 * self.names.index(name)
        return Mean(self.numbers[..., at], self.numbers[..., at + 1])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[str, ...]]:
        """Return the array, and the names."""
        return (self.numbers,), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], leaves: tuple[Any]) -> "PackedMetrics":
        """Build the metrics from what `tree_flatten` returned."""
        return cls(leaves[0], names)


def pack_metrics(step: StepFn) -> StepFn:
    """Return the step whose metrics are one array, unless one of them is no scalar of float32."""

    def packed(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch)
        names = tuple(sorted(metrics))
        numbers = [x for name in names for x in (metrics[name].total, metrics[name].weight)]
        if any(jnp.shape(x) or jnp.result_type(x) != jnp.float32 for x in numbers):
            return state, metrics
        return state, PackedMetrics(jnp.stack(numbers), names)

    return packed


def select(metrics: Metrics, names: Sequence[str]) -> Metrics:
    """Return at least the metrics of these names that there are, without a call to a device."""
    if isinstance(metrics, PackedMetrics):
        return metrics
    return {name: metrics[name] for name in names if name in metrics}


def join_calls(calls: Sequence[Metrics]) -> Metrics:
    """Return the metrics of calls as those of one call, whose steps follow one another.

    Args:
        calls: numpy arrays, with or without a dim of steps.
    """
    with_steps = np.atleast_2d if isinstance(calls[0], PackedMetrics) else np.atleast_1d
    return jax.tree.map(lambda *x: np.concatenate([with_steps(each) for each in x]), *calls)
