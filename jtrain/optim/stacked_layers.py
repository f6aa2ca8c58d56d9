"""Leaves that stack the layers of a model: a rule treats each layer as a leaf of its own.

A model that scans over its layers keeps one leaf for all of them, with a leading dim `layers`. A
rule that reads the number of dims of a leaf, or the norm of a leaf, would take other steps with it
than with the leaves of layers that are written out one after the other.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jtrain.core import pytree
from jtrain.core.types import Dims, Leaf, Params

LAYERS = "layers"  # the name of such a dim in `Model.dims`


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
        def of_leaf(path: tuple[Any, ...], u: Leaf, *p: Leaf) -> Leaf:
            of_layer = lambda u, *p: transformation.update(u, state, *p)[0]
            for _ in range(stacked_dims(pytree.name(path), dims)):
                of_layer = jax.vmap(of_layer)
            return of_layer(u, *p)

        rest = () if params is None else (params,)
        return jax.tree_util.tree_map_with_path(of_leaf, updates, *rest), state

    return optax.GradientTransformation(transformation.init, update)
