"""Reports of a bad step: the data it took, and the leaf of the parameters that shows it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.config.lookup import FIT
from jtrain.core.gradient import make_gradient
from jtrain.core.precision.loss_scale import Unscaled
from jtrain.core.pytree import named_leaves, norm
from jtrain.core.state import TrainState
from jtrain.core.types import Batch, Leaf
from jtrain.optim.recipe import OptimizerConfig
from jtrain.parallel.offload import to_device
from jtrain.train.hooks.bad_steps import BadStep
from jtrain.train.setup import TrainSetup


def step_report(setup: TrainSetup, step: int) -> dict[str, Any]:
    """Return the number of the batch that a step took, from 0, and its rows in the data set.

    The first step is 1. Rows are those of the whole batch, whichever process read them; they are
    left out where the data set does not number them.
    """
    number = setup.train.number(step - 1)
    indices = getattr(setup.experiment.train, "indices", None)
    return {"batch": number, **({"rows": indices(number).tolist()} if indices else {})}


def describe_bad_step(setup: TrainSetup, state: TrainState, bad: BadStep, last: int) -> str:
    """Describe the bad step that ended a run, and what to type.

    This compiles a program for its gradient, so every process of the run calls it.

    Args:
        state: after step `last`, which may be later: the state before the bad step is not retained.
    """
    number, run = step_report(setup, bad.step)["batch"], f"runs/{setup.config.name}/config.yaml"
    if bad.is_only_update:
        return (
            f"It took batch {number}, and loss and gradient of that are finite: the update alone "
            f"is not, so the data is not the cause. {_smaller_updates(setup, run)}"
        )
    how = f": jtrain run {run} guard.without='[[{number}, {number + 1}]]'"
    if setup.config.experiment == FIT:  # no config of it can be run
        how = ', repeat the call with guard="skip".'
    return (
        f"It took batch {number}; of its gradient at the parameters after step {last}, leaf by "
        f"leaf, {_leaf(setup, state, bad.step)} To go on without that batch{how}"
    )


def _smaller_updates(setup: TrainSetup, run: str) -> str:
    """Return what to type for smaller updates."""
    optimizer = setup.config.optimizer
    if not isinstance(optimizer, OptimizerConfig):  # one that was handed over whole
        return "Lower its learning rate, or clip the gradient: optax.clip_by_global_norm(1.0)."
    lr = f"{min(1e-3, optimizer.lr / 10):g}"
    if setup.config.experiment == FIT:
        return f"Lower the learning rate: repeat the call with lr={lr}."
    clip = "" if optimizer.clip or optimizer.kind == "lbfgs" else " or set optimizer.clip=1.0"
    return (
        f"Lower optimizer.lr{clip}, in a run of its own: jtrain run {run} "
        f"name={setup.config.name}-2 optimizer.lr={lr}"
    )


def _leaf(setup: TrainSetup, state: TrainState, step: int) -> str:
    """Describe the leaf of the largest, or not finite, gradient of a step's batch at this state."""
    batch = setup.strategy.place(setup.train[step - 1])
    state = dataclasses.replace(state, step=jnp.full_like(state.step, step - 1))
    norms = jax.device_get(setup.strategy.compile(_norms(setup), setup.like, batch)(state, batch))
    broken = [name for name, x in norms.items() if not np.isfinite(x)]
    if broken:
        count = f"{len(broken)} of {len(norms)} are not finite"
        return f"{count}, the first of them {broken[0]}."
    most = max(norms, key=lambda name: norms[name])
    return f"{most} is the largest, of norm {norms[most]:.4g}."


def _norms(setup: TrainSetup) -> Callable[[TrainState, Batch], dict[str, Leaf]]:
    """Return `(state, batch) -> norms` of the exact gradient, of each leaf by name."""
    gradient_of = make_gradient(
        setup.loss,
        microbatches=setup.config.microbatches,
        psum=setup.strategy.psum,
        ragged=setup.experiment.train.ragged,
    )

    def norms(state: TrainState, batch: Batch) -> dict[str, Leaf]:
        state = dataclasses.replace(to_device(state, setup.like), scale=Unscaled())
        grads = gradient_of(state, batch)(state.params).grads
        return {name: norm(leaf) for name, leaf in named_leaves(grads).items()}

    return norms
