"""The network of a small CNN."""

import itertools
import math

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.models.layers.convolution import Convolution
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.image_classes import as_images
from jtrain.models.layers.linear import Linear


class CNNModule(nnx.Module):
    """Images to logits; the arguments are the fields of `jtrain.models.cnn.CNN`."""

    def __init__(
        self,
        *,
        image: tuple[int, int, int],
        channels: tuple[int, ...],
        kernel: int,
        widths: tuple[int, ...],
        classes: int,
        dropout: float,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.image, self.dropout, self.placement = image, dropout, placement
        self.deterministic = True
        height, width, inputs = image
        halved = 2 ** len(channels)
        he = lambda inputs: math.sqrt(2 / inputs)  # He et al. 2015
        self.convolutions = nnx.List(
            Convolution(a, b, kernel, bias=True, std=he(a * kernel**2), rngs=rngs)
            for a, b in itertools.pairwise((inputs, *channels))
        )
        flat = (height // halved) * (width // halved) * channels[-1]
        self.layers = nnx.List(
            Linear(a, b, std=he(a), rngs=rngs)
            for a, b in itertools.pairwise((flat, *widths, classes))
        )

    def __call__(
        self,
        x: Num[Array, "b *s"],
        keys: Shaped[Array, "b"] | None = None,
        mask: Bool[Array, "b"] | None = None,
    ) -> Float[Array, "b c"]:
        """Return the logits of each row.

        Raises:
            DataError: if the images have another shape.
            LossError: if the network trains with dropout and `keys` is None.
        """
        keys = drawn_from(keys, self.dropout, train=not self.deterministic)
        x = as_images(x, self.image, self.layers[0].kernel[...].dtype, mask)
        for layer in self.convolutions:
            # ReLU changes no order, so it can come after the pool, on a quarter of the numbers.
            x = jax.nn.relu(layer(x, pool=2))
            x = self.placement.constrain(x, "batch", "height", "width", "channels")
        x = drop(x.reshape(x.shape[0], -1), self.dropout, keys)
        for site, layer in enumerate(self.layers[:-1], 1):
            x = self.placement.constrain(jax.nn.relu(layer(x)), "batch", "hidden")
            x = drop(x, self.dropout, keys, site=site)
        return self.placement.constrain(self.layers[-1](x), "batch", "classes")
