"""The network of a multilayer perceptron."""

import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.errors import DataError
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.linear import Linear
from jtrain.models.mlp import MLP


class MLPModule(nnx.Module):
    """Rows of numbers to logits."""

    def __init__(self, values: MLP, place: Placement, rngs: nnx.Rngs):
        self.values, self.place = values, place
        self.deterministic = True
        sizes = (values.inputs, *values.widths, values.classes)
        self.layers = nnx.List(
            Linear(before, after, std=math.sqrt(2 / before), rngs=rngs)  # He et al. 2015
            for before, after in itertools.pairwise(sizes)
        )

    def __call__(
        self, x: Num[Array, "b *s"], keys: Shaped[Array, "b"] | None = None
    ) -> Float[Array, "b c"]:
        """Logits of each row.

        Raises:
            DataError: if a row holds another count of numbers than `inputs`.
            LossError: if it shall drop and got no keys.
        """
        if math.prod(x.shape[1:]) != self.values.inputs:
            raise DataError(
                f"rows of shape {list(x.shape[1:])} hold {math.prod(x.shape[1:])} numbers, and the "
                f"model takes {self.values.inputs}. Set model.inputs={math.prod(x.shape[1:])}."
            )
        keys = drawn_from(keys, self.values.dropout, train=not self.deterministic)
        dtype = self.layers[0].kernel[...].dtype
        x = x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)
        x = x.reshape(x.shape[0], -1)
        for site, layer in enumerate(self.layers[:-1]):
            x = self.place.constrain(jax.nn.relu(layer(x)), "batch", "hidden")
            x = drop(x, self.values.dropout, keys, site=site)
        return self.place.constrain(self.layers[-1](x), "batch", "classes")
