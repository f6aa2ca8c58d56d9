"""Optimizer rules for complex leaves, whose real and imaginary parts are leaves of their own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.types import Params


class PartsState(NamedTuple):
    """State of a rule for parameters some of which are complex."""

    real: Any
    """State of the real leaves and the real parts."""
    imaginary: Any
    """State of the imaginary parts."""


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
        real, first = inner.update(_real(updates), state.real, _real(params), **known)
        imaginary, second = inner.update(
            _imaginary(updates), state.imaginary, _imaginary(params), **known
        )
        return _join(real, imaginary), PartsState(first, second)

    return optax.GradientTransformationExtraArgs(init, update)


def _any_complex(tree: Params) -> bool:
    return any(map(jnp.iscomplexobj, jax.tree.leaves(tree)))


def _real(tree: Params) -> Params:
    return jax.tree.map(jnp.real, tree)


def _imaginary(tree: Params) -> Params:
    """Return the imaginary parts; None in the place of a real leaf."""
    return jax.tree.map(lambda x: x.imag if jnp.iscomplexobj(x) else None, tree)


def _join(real: Params, imaginary: Params) -> Params:
    return jax.tree.map(lambda x, y: x if y is None else jax.lax.complex(x, y), real, imaginary)
