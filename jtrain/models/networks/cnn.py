"""The network of a small CNN."""

import itertools
import math

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.models.cnn import CNN
from jtrain.models.layers.convolution import Convolution
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.images import as_images
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.pooling import max_pool


class CNNModule(nnx.Module):
    """Images to logits."""

    def __init__(self, values: CNN, place: Placement, rngs: nnx.Rngs):
        self.values, self.place = values, place
        self.deterministic = True
        height, width, inputs = values.image
        channels, halved = values.channels, 2 ** len(values.channels)
        he = lambda inputs: math.sqrt(2 / inputs)  # He et al. 2015
        self.convolutions = nnx.List(
            Convolution(a, b, values.kernel, bias=True, std=he(a * values.kernel**2), rngs=rngs)
            for a, b in itertools.pairwise((inputs, *channels))
        )
        flat = (height // halved) * (width // halved) * channels[-1]
        self.layers = nnx.List(
            Linear(a, b, std=he(a), rngs=rngs)
            for a, b in itertools.pairwise((flat, *values.widths, values.classes))
        )

    def __call__(
        self,
        x: Num[Array, "b *s"],
        keys: Shaped[Array, "b"] | None = None,
        mask: Bool[Array, "b"] | None = None,
    ) -> Float[Array, "b c"]:
        """Logits of each row.

        Raises:
            DataError: if the images have another shape.
            LossError: if it shall drop and got no keys.
        """
        rate = self.values.dropout
        keys = drawn_from(keys, rate, train=not self.deterministic)
        x = as_images(x, self.values.image, self.layers[0].kernel[...].dtype, mask)
        for layer in self.convolutions:
            # ReLU changes no order, so it can come after the pool, on a quarter of the numbers.
            x = jax.nn.relu(max_pool(layer(x), 2))
            x = self.place.constrain(x, "batch", "height", "width", "channels")
        x = drop(x.reshape(x.shape[0], -1), rate, keys)
        for site, layer in enumerate(self.layers[:-1], 1):
            x = self.place.constrain(jax.nn.relu(layer(x)), "batch", "hidden")
            x = drop(x, rate, keys, site=site)
        return self.place.constrain(self.layers[-1](x), "batch", "classes")
