"""Whether a gradient that is not finite in float16 overflowed, or is finite at no loss scale."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jtrain.core.precision.loss_scale import LossScale
from jtrain.core.state import TrainState
from jtrain.core.step import make_step
from jtrain.core.types import Batch
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.parallel.offload import to_device
from jtrain.train.setup import TrainSetup

RECENT = 16  # calls whose batches are kept: 8 in flight, and those that are read ahead


class OverflowCheck:
    """Takes the gradient of a recent batch again, at the smallest loss scale.

    A loss scale is lowered after each overflow until none is left, or it is at its minimum. So a
    gradient that is not finite there would not be finite however often the scale were lowered. The
    parameters are those of the newest state, some calls later than the step: those of the step are
    no more.
    """

    def __init__(self, parts: TrainSetup):
        self._parts = parts
        self._batches: collections.deque[tuple[int, Batch]] = collections.deque(maxlen=RECENT)
        self._program: Callable[[TrainState, Batch], jax.Array] | None = None

    def observe(self, call: int, batch: Batch) -> None:
        """Keep what a call is going to be given, the first call being 0; on any thread."""
        self._batches.append((call, batch))

    def helps(self, step: int, state: TrainState) -> bool:
        """Return whether the gradient of a step's batch is finite at the smallest loss scale.

        Compiles a program at the first call. Every process of a run calls this at the same time.

        Args:
            step: the first of a run is 1.
            state: the newest, not donated yet.
        """
        batch = self._parts.strategy.place(self._batch(step))
        if self._program is None:
            with HEARTBEAT.during("compile"):
                compiled = self._parts.strategy.compile
                self._program = compiled(_is_finite(self._parts), self._parts.like, batch)
        state = dataclasses.replace(state, step=jnp.full_like(state.step, step - 1))
        return bool(jax.device_get(self._program(state, batch)))

    def _batch(self, step: int) -> Batch:
        each = self._parts.config.steps_per_call
        call, place = divmod(step - 1, each)
        batch = next(batch for number, batch in reversed(self._batches) if number == call)
        return {name: x[place] for name, x in batch.items()} if each > 1 else batch


def _is_finite(parts: TrainSetup) -> Callable[[TrainState, Batch], Any]:
    """Return `(state, batch) -> whether the step would be taken at the smallest loss scale`."""
    x, strategy = parts.experiment, parts.strategy
    step = make_step(
        x.loss,
        optax.identity(),
        microbatches=parts.config.microbatches,
        couples=x.couples,
        psum=strategy.psum,
        ragged=x.train.ragged,
        compute=parts.config.precision.compute,
        sharding=strategy.gradient_sharding(parts.like.params, x.dims),
    )

    def is_finite(state: TrainState, batch: Batch) -> Any:
        state, scale = to_device(state, parts.like), state.scale
        assert isinstance(scale, LossScale), "only a gradient that is scaled overflows for it"
        smallest = dataclasses.replace(scale, factor=jnp.full_like(scale.factor, scale.minimum))
        at = dataclasses.replace(state, scale=smallest, opt_state=optax.EmptyState())
        return step(at, batch)[0].skipped == state.skipped

    return is_finite
