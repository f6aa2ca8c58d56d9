"""What changes from step to step."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jtrain.types import Extra, Key, Leaf, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Arrays only: no functions, no config, so it can be saved, sharded and compared."""

    step: Leaf  # int32 scalar: batches seen
    skipped: (
        Leaf  # int32 scalar: those of them that changed nothing, as their gradient was not finite
    )
    params: Params
    extra: Extra
    opt_state: optax.OptState
    rng: Leaf  # one PRNG key, the same all through a run


def new_state(
    params: Params, optimizer: optax.GradientTransformation, rng: Key, extra: Extra = ()
) -> TrainState:
    """The state before the first step.

    Jit the function that makes it with the shardings it shall have: nothing is made whole first.
    """
    return TrainState(
        step=jnp.int32(0),
        skipped=jnp.int32(0),
        params=params,
        extra=extra,
        opt_state=optimizer.init(params),
        rng=rng,
    )
