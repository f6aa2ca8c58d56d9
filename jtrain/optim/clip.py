"""Clipping of gradients by their global norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jtrain.core.pytree import norm
from jtrain.core.types import Leaf, Params


def clip_by_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients down to a norm of at most `most` over all leaves.

    A step passes its gradients (`grad`) and their norm, summed over the devices (`grad_norm`). If
    the updates are these gradients, that norm is used. A second sum would be inside the branch that
    applies or skips the step, and on JAX's CPU devices a collective in a branch can wait for one
    outside of it if threads are short (docs/decisions.md).
    """

    def update(
        updates: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        grad: Params | None = None,
        grad_norm: Leaf | None = None,
        **extra: Any,
    ):
        del params, extra
        size = grad_norm if grad_norm is not None and _same(updates, grad) else norm(updates)
        scale = lambda u: jnp.where(size < most, u, u / size.astype(u.dtype) * most)
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _same(updates: Params, grad: Params) -> bool:
    """Return whether the updates are the gradients themselves, unchanged and complete."""
    ours, theirs = jax.tree.leaves(updates), jax.tree.leaves(grad)
    return len(ours) == len(theirs) and all(map(lambda a, b: a is b, ours, theirs))
