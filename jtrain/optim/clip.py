"""Gradients scaled down to a largest norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jtrain.core.pytree import norm
from jtrain.core.types import Leaf, Params


def clip_by_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """Gradients of at most this norm over all leaves; those of a smaller one are left as they are.

    A step gives its gradients (`grad`) and the norm that it has summed over the devices
    (`grad_norm`). Where what arrives here is these very gradients that norm is taken. Summed again
    it would be within the branch that takes a step or leaves it, and a collective in a branch waits
    for one outside of it, on JAX's CPU devices, if threads are short (docs/log.md).
    """

    def update(
        updates: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        grad: Params | None = None,
        grad_norm: Leaf | None = None,
        **known: Any,
    ):
        del params, known
        size = grad_norm if grad_norm is not None and _same(updates, grad) else norm(updates)
        scale = lambda u: jnp.where(size < most, u, u / size.astype(u.dtype) * most)
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _same(updates: Params, grad: Params) -> bool:
    """Whether no stage before, and no split into groups of leaves, has touched the gradients."""
    ours, theirs = jax.tree.leaves(updates), jax.tree.leaves(grad)
    return len(ours) == len(theirs) and all(map(lambda a, b: a is b, ours, theirs))
