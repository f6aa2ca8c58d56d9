"""Leaves that stack layers: an optimizer rule treats each layer as a leaf of its own.

A model that scans over its layers has one leaf for all layers, with a leading dim `layers`. A rule
that depends on the number of dims or the norm of a leaf would take other steps for the stack than
for separate leaves.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jtrain.core import pytree
from jtrain.core.types import Dims, Leaf, Params

LAYERS = "layers"  # the name of the stacked dim in `Model.dims`


def stacked_dims(name: str, dims: Mapping[str, Dims]) -> int:
    """Return how many leading dims of the leaf `name` stack layers."""
    named = dims.get(name, ())
    return next((i for i, dim in enumerate(named) if dim != LAYERS), len(named))


def layer_ndim(name: str, leaf: Leaf, dims: Mapping[str, Dims]) -> int:
    """Return the number of dims that one layer of the leaf `name` has."""
    return leaf.ndim - stacked_dims(name, dims)


def layerwise(
    transformation: optax.GradientTransformation, dims: Mapping[str, Dims]
) -> optax.GradientTransformation:
    """Apply a `transformation` without state to each layer of each leaf.

    The state stays optax's own, so that checkpoints keep their structure.
    """

    def update(updates: Params, state: Any, params: Params | None = None):
        def update_leaf(path: tuple[Any, ...], u: Leaf, *p: Leaf) -> Leaf:
            update_layer = lambda u, *p: transformation.update(u, state, *p)[0]
            for _ in range(stacked_dims(pytree.name(path), dims)):
                update_layer = jax.vmap(update_layer)
            return update_layer(u, *p)

        rest = () if params is None else (params,)
        return jax.tree_util.tree_map_with_path(update_leaf, updates, *rest), state

    return optax.GradientTransformation(transformation.init, update)
