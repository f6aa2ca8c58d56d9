"""The update of a step, taken only where its gradient is finite."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jtrain.core.pytree import norm
from jtrain.core.types import Extra, Params


class UpdateResult(NamedTuple):
    """The parts of a state that an update changes."""

    params: Params
    opt_state: optax.OptState
    extra: Extra
    update_norm: Float[Array, ""]


def is_finite_update(after: Extra, changes: Extra) -> Bool[Array, ""]:
    """Return whether the leaves of `extra` that changed are finite in `after`."""
    leaf = lambda new, change: True if change is None else jnp.isfinite(new).all()
    flags = jax.tree.map(leaf, after, changes, is_leaf=lambda x: x is None)
    return jax.tree.reduce(jnp.logical_and, flags, jnp.bool_(True))


def update_if(
    finite: Bool[Array, ""],
    update: Callable[..., tuple[Params, optax.OptState]],
    grads: Params,
    opt_state: optax.OptState,
    params: Params,
    extra: Extra,
    extra_after: Extra,
    *,
    sharded: bool = False,
    **known: Any,
) -> UpdateResult:
    """Return the result of `update(grads, opt_state, params, **known)`, or the old values.

    The gradients stand for updates that are not taken, so that either can lie in their memory.

    Args:
        sharded: whether the compiler may exchange data for the update.
    """

    def take():
        updates, after = update(grads, opt_state, params, **known)
        return optax.tree.cast_like(updates, params), after, extra_after

    stay = lambda: (optax.tree.cast_like(grads, params), opt_state, extra)
    branch = lambda: jax.lax.cond(finite, take, stay)
    choose = lambda new, old: jnp.where(finite, new, old)
    select = lambda: jax.tree.map(choose, take(), stay())
    with jax.named_scope("optimizer"):  # the name of these operations in programs and profiles
        updates, opt_state, extra = _by_platform(branch, select, sharded)
        update_norm = jnp.where(finite, norm(updates), 0)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, -0.0), updates)  # x + -0.0 is x
        params = optax.apply_updates(params, updates)
    return UpdateResult(params, opt_state, extra, update_norm)


def _by_platform(branch: Callable[[], Any], select: Callable[[], Any], sharded: bool) -> Any:
    """Return the result of a branch or of a select, whichever is better where it runs.

    XLA:GPU copies the flag of a branch to the host and waits for it in the middle of each step. For
    a select XLA:CPU copies the whole donated state, a quarter of the time of a small step
    (docs/decisions.md); a collective of a branch may run beside one after it and deadlock with it
    (`distributed/cpu_threads.py`).
    """
    on_cpu = {"cpu": select} if sharded else {}  # each is traced
    return jax.lax.platform_dependent(cuda=select, default=branch, **on_cpu)
