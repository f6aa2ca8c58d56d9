"""TrainState: the arrays that a step changes."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jtrain.core.extra_arguments import check_optimizer
from jtrain.core.precision.loss_scale import LossScale, Unscaled
from jtrain.core.types import Extra, Key, Leaf, Params
from jtrain.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Arrays only: no functions, no config, so it can be saved, sharded and compared."""

    step: Leaf  # int32 scalar: batches seen
    skipped: Leaf  # int32 scalar: steps without effect, since their gradient was not finite
    scale: LossScale | Unscaled  # the factor on the loss; no leaf unless it computes in float16
    params: Params
    extra: Extra
    opt_state: optax.OptState
    seed: Leaf  # uint32: key data of the run's key, of JAX's default PRNG; constant in a run

    def step_key(self) -> Key:
        """Return the random key of this step, the same in every microbatch and shard."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.seed), self.step)


def new_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    rng: Key,
    extra: Extra = (),
    *,
    scale: LossScale | Unscaled = Unscaled(),
) -> TrainState:
    """Return the state before the first step.

    Call it under `jit` with `out_shardings`, so that no array is ever unsharded. The key is of
    JAX's default PRNG, or a ConfigError is raised.
    """
    check_optimizer(optimizer)
    if (found := jax.random.key_impl(rng)) != jax.random.key_impl(jax.random.key(0)):
        raise ConfigError(
            f"the key is one of {found}, and a step makes keys of JAX's default PRNG. Write "
            f"jax.random.key(0), or set the default: JAX_DEFAULT_PRNG_IMPL={found}"
        )
    return TrainState(
        step=jnp.int32(0),
        skipped=jnp.int32(0),
        scale=scale,
        params=params,
        extra=extra,
        opt_state=optimizer.init(params),
        # As plain numbers: a typed key costs a call 20 us of Python.
        seed=jax.random.key_data(rng),
    )
