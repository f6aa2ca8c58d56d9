"""Overflow check: is a gradient that is not finite in float16 finite at a smaller loss scale?"""

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

RECENT = 16  # calls whose batches are kept: 8 in flight, and the prefetched ones


class OverflowCheck:
    """Recomputes the gradient of a recent batch at the smallest loss scale.

    The loss scale is lowered after each overflow, down to its minimum. A gradient that is not
    finite at the minimum is finite at no scale. The parameters are those of the newest state, some
    calls after the step, because the step's own are already donated.
    """

    def __init__(self, setup: TrainSetup):
        self._setup = setup
        self._batches: collections.deque[tuple[int, Batch]] = collections.deque(maxlen=RECENT)
        self._program: Callable[[TrainState, Batch], jax.Array] | None = None

    def observe(self, call: int, batch: Batch) -> None:
        """Keep the batch of an upcoming call (the first is 0); on any thread."""
        self._batches.append((call, batch))

    def helps(self, step: int, state: TrainState) -> bool:
        """Return whether the gradient of a step's batch is finite at the smallest loss scale.

        Compiles a program at the first call. Every process of a run calls this at the same time.

        Args:
            step: the first step of a run is 1.
            state: the newest state, not donated yet.
        """
        batch = self._setup.strategy.place(self._batch(step))
        if self._program is None:
            with HEARTBEAT.during("compile"):
                compiled = self._setup.strategy.compile
                self._program = compiled(_is_finite(self._setup), self._setup.like, batch)
        state = dataclasses.replace(state, step=jnp.full_like(state.step, step - 1))
        return bool(jax.device_get(self._program(state, batch)))

    def _batch(self, step: int) -> Batch:
        steps_per_call = self._setup.config.steps_per_call
        call, i = divmod(step - 1, steps_per_call)
        batch = next(batch for number, batch in reversed(self._batches) if number == call)
        return {name: x[i] for name, x in batch.items()} if steps_per_call > 1 else batch


def _is_finite(setup: TrainSetup) -> Callable[[TrainState, Batch], Any]:
    """Return `(state, batch) -> whether the step would be taken at the smallest loss scale`."""
    x, strategy = setup.experiment, setup.strategy
    step = make_step(
        x.loss,
        optax.identity(),
        microbatches=setup.config.microbatches,
        couples=x.couples,
        psum=strategy.psum,
        ragged=x.train.ragged,
        compute=setup.config.precision.compute,
        sharding=strategy.gradient_sharding(setup.like.params, x.dims),
    )

    def is_finite(state: TrainState, batch: Batch) -> Any:
        state, scale = to_device(state, setup.like), state.scale
        assert isinstance(scale, LossScale), "only a gradient that is scaled overflows for it"
        smallest = dataclasses.replace(scale, factor=jnp.full_like(scale.factor, scale.minimum))
        at = dataclasses.replace(state, scale=smallest, opt_state=optax.EmptyState())
        return step(at, batch)[0].skipped == state.skipped

    return is_finite
