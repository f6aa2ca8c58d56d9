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


class MLPModule(nnx.Module):
    """Rows of numbers to logits; the arguments are the fields of `jtrain.models.mlp.MLP`."""

    def __init__(
        self,
        *,
        inputs: int,
        widths: tuple[int, ...],
        classes: int,
        dropout: float,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.inputs, self.dropout, self.placement = inputs, dropout, placement
        self.deterministic = True
        self.layers = nnx.List(
            Linear(before, after, std=math.sqrt(2 / before), rngs=rngs)  # He et al. 2015
            for before, after in itertools.pairwise((inputs, *widths, classes))
        )

    def __call__(
        self, x: Num[Array, "b *s"], keys: Shaped[Array, "b"] | None = None
    ) -> Float[Array, "b c"]:
        """Return the logits of each row.

        Raises:
            DataError: if a row does not hold `inputs` numbers.
            LossError: if the network trains with dropout and `keys` is None.
        """
        size = math.prod(x.shape[1:])
        if size != self.inputs:
            raise DataError(
                f"rows of shape {list(x.shape[1:])} hold {size} numbers, and the "
                f"model takes {self.inputs}. Set model.inputs={size}."
            )
        keys = drawn_from(keys, self.dropout, train=not self.deterministic)
        dtype = self.layers[0].kernel[...].dtype
        x = x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)
        x = x.reshape(x.shape[0], -1)
        for site, layer in enumerate(self.layers[:-1]):
            x = self.placement.constrain(jax.nn.relu(layer(x)), "batch", "hidden")
            x = drop(x, self.dropout, keys, site=site)
        return self.placement.constrain(self.layers[-1](x), "batch", "classes")
