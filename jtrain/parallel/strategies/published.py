"""State of servers that send workers what has changed: the parameters as the workers have them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jtrain.core.types import Params


class PublishedState(NamedTuple):
    """State of the outer optimizer, and what workers have of the parameters."""

    outer: optax.OptState
    published: Params


def with_published(outer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the outer optimizer whose state also has the parameters as workers have them.

    An update leaves them as they are: the servers replace them when they publish a change.
    """

    def init(params: Params) -> PublishedState:
        return PublishedState(outer.init(params), jax.tree.map(jnp.copy, params))

    def update(updates: Params, state: Any, params: Params | None = None):
        updates, after = outer.update(updates, state.outer, params)
        return updates, PublishedState(after, state.published)

    return optax.GradientTransformation(init, update)
