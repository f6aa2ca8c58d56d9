"""A small loop to test hooks with: a jitted step that counts."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jtrain.core.loop import Hook, LoopResult, train_loop
from jtrain.core.mean import Mean


@jax.jit
def _step(state, batch):
    state = state + batch
    numbers = {"loss": 1 / state, "skipped": jnp.zeros(())}
    return state, {name: Mean(x, jnp.ones(())) for name, x in numbers.items()}


def run(hooks: Sequence[Hook], *, stop: int, start: int = 0) -> LoopResult:
    """Run steps `start + 1 .. stop`; the state is the step, the loss one over it."""
    one = jnp.ones(())
    feed = (one for _ in range(start, stop))
    return train_loop(_step, jnp.float32(start), feed, start=start, stop=stop, hooks=hooks)
