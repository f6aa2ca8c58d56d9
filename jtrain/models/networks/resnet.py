"""The network of a ResNet."""

from typing import TypeAlias

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.models.layers.batch_norm import BatchNorm
from jtrain.models.layers.convolution import Convolution
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.group_norm import GroupNorm
from jtrain.models.layers.images import as_images
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.pooling import max_pool
from jtrain.models.resnet import ResNet

DIMS = ("batch", "height", "width", "channels")
Mask: TypeAlias = Bool[Array, "b"] | None


class ResNetModule(nnx.Module):
    """Images to logits."""

    def __init__(self, values: ResNet, place: Placement, rngs: nnx.Rngs):
        self.values, self.place = values, place
        self.deterministic = True
        kernel, stride = (7, 2) if values.stem == "imagenet" else (3, 1)
        channels = values.width
        self.stem = Convolution(values.image[2], channels, kernel, stride=stride, rngs=rngs)
        self.norm = norm_of(values, channels)
        self.blocks = nnx.List()
        for stage, count in enumerate(values.blocks):
            for index in range(count):
                stride = 2 if stage and not index else 1
                width = values.width * 2**stage
                block = ResidualBlock(values, place, channels, width, stride=stride, rngs=rngs)
                self.blocks.append(block)
                channels = block.outputs
        self.head = Linear(channels, values.classes, std=0.01, rngs=rngs)

    def __call__(
        self,
        x: Num[Array, "b *s"],
        keys: Shaped[Array, "b"] | None = None,
        mask: Mask = None,
    ) -> Float[Array, "b c"]:
        """Logits of each row.

        Raises:
            DataError: if the images have another shape.
            LossError: if it shall drop and got no keys.
        """
        rate = self.values.dropout
        keys = drawn_from(keys, rate, train=not self.deterministic)
        x = as_images(x, self.values.image, self.stem.kernel[...].dtype, mask)
        x = self.norm(self.stem(x), mask)
        if self.values.stem == "imagenet":
            x = max_pool(x, 3, 2, 1)
        x = self.place.constrain(jax.nn.relu(x), *DIMS)  # after the pool: it changes no order
        for block in self.blocks:
            x = block(x, mask)
        x = at_least_f32(x).mean((1, 2)).astype(x.dtype)
        x = drop(self.place.constrain(x, "batch", "channels"), rate, keys)
        return self.place.constrain(self.head(x), "batch", "classes")


class ResidualBlock(nnx.Module):
    """Convolutions, each with a norm, added to what came in; ReLU between and after."""

    def __init__(
        self,
        values: ResNet,
        place: Placement,
        inputs: int,
        width: int,
        *,
        stride: int,
        rngs: nnx.Rngs,
    ):
        self.place = place
        self.outputs = width * (4 if values.bottleneck else 1)
        # Inputs, outputs, kernel and stride of each convolution.
        basic = [(inputs, width, 3, stride), (width, width, 3, 1)]
        narrow = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        layers = narrow if values.bottleneck else basic
        self.convolutions = nnx.List(
            Convolution(a, b, kernel, stride=by, rngs=rngs) for a, b, kernel, by in layers
        )
        last = 0.0 if values.quiet else 1.0
        self.norms = nnx.List(norm_of(values, layer[1]) for layer in layers[:-1])
        self.norms.append(norm_of(values, self.outputs, scale=last))
        same = inputs == self.outputs and stride == 1
        self.short = (
            None if same else Convolution(inputs, self.outputs, 1, stride=stride, rngs=rngs)
        )
        self.norm_short = None if same else norm_of(values, self.outputs)

    def __call__(self, x: Float[Array, "b h w i"], mask: Mask) -> Float[Array, "b y x o"]:
        """The sum, bent."""
        y = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = y if convolution is self.convolutions[0] else jax.nn.relu(y)
            y = self.place.constrain(norm(convolution(y), mask), *DIMS)
        if self.short is not None and self.norm_short is not None:
            x = self.norm_short(self.short(x), mask)
        return self.place.constrain(jax.nn.relu(x + y), *DIMS)


def norm_of(values: ResNet, channels: int, *, scale: float = 1.0) -> BatchNorm | GroupNorm:
    """The norm that the values ask for."""
    if values.norm == "batch":
        return BatchNorm(channels, scale=scale)
    return GroupNorm(channels, groups=values.groups, scale=scale)
