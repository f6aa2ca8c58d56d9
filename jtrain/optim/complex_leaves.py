"""Optimizer rules for complex leaves, whose real and imaginary parts are leaves of their own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.types import Params


class PartsState(NamedTuple):
    """States of a rule for the real leaves and parts, and for the imaginary parts."""

    real: Any
    imaginary: Any


def by_parts(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `rule` of the real and the imaginary part of each complex leaf, as in PyTorch.

    Parameters without complex leaves have the state and the program of `rule`.
    """
    inner = optax.with_extra_args_support(rule)

    def init(params: Params) -> Any:
        if not _any_complex(params):
            return rule.init(params)
        return PartsState(rule.init(_real(params)), rule.init(_imaginary(params)))

    def update(updates: Params, state: Any, params: Params | None = None, **known: Any):
        if not _any_complex(updates):
            return inner.update(updates, state, params, **known)
        real, first = inner.update(_real(updates), state[0], _real(params), **known)
        imaginary, second = inner.update(_imaginary(updates), state[1], _imaginary(params), **known)
        join = lambda x, y: x if y is None else jax.lax.complex(x, y)
        return jax.tree.map(join, real, imaginary), PartsState(first, second)

    return optax.GradientTransformationExtraArgs(init, update)


def _any_complex(tree: Params) -> bool:
    return any(map(jnp.iscomplexobj, jax.tree.leaves(tree)))


def _real(tree: Params) -> Params:
    return jax.tree.map(jnp.real, tree)


def _imaginary(tree: Params) -> Params:
    """Return the imaginary parts; None in the place of a real leaf."""
    return jax.tree.map(lambda x: x.imag if jnp.iscomplexobj(x) else None, tree)
