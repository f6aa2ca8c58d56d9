"""The network of a ResNet."""

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.models.layers.batch_norm import BatchNorm
from jtrain.models.layers.convolution import Convolution
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.group_norm import GroupNorm
from jtrain.models.layers.image_classes import as_images
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.pooling import max_pool
from jtrain.models.pixels import Pixels

DIMS = ("batch", "height", "width", "channels")
Mask: TypeAlias = Bool[Array, "b"] | None
MakeNorm: TypeAlias = Callable[..., BatchNorm | GroupNorm]  # (channels, *, scale=1.0)


class ResNetModule(nnx.Module):
    """Images to logits; the arguments are the fields of `jtrain.models.resnet.ResNet`."""

    def __init__(
        self,
        *,
        image: tuple[int, int, int],
        pixels: Pixels,
        blocks: tuple[int, ...],
        bottleneck: bool,
        width: int,
        stem: Literal["imagenet", "cifar"],
        norm: Literal["batch", "group"],
        groups: int,
        statistics: Literal["batch", "running"],
        quiet: bool,
        classes: int,
        dropout: float,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.image, self.pixels = image, pixels
        self.dropout, self.placement = dropout, placement
        self.deterministic = True
        self.pools = stem == "imagenet"
        make_norm = (
            functools.partial(BatchNorm, frozen=statistics == "running")
            if norm == "batch"
            else functools.partial(GroupNorm, groups=groups)
        )
        kernel, stride = (7, 2) if self.pools else (3, 1)
        channels = width
        self.stem = Convolution(pixels.shape(image)[2], channels, kernel, stride=stride, rngs=rngs)
        self.norm = make_norm(channels)
        self.blocks = nnx.List()
        for stage, count in enumerate(blocks):
            for index in range(count):
                block = ResidualBlock(
                    channels,
                    width * 2**stage,
                    stride=2 if stage and not index else 1,
                    bottleneck=bottleneck,
                    quiet=quiet,
                    make_norm=make_norm,
                    placement=placement,
                    rngs=rngs,
                )
                self.blocks.append(block)
                channels = block.outputs
        self.head = Linear(channels, classes, std=0.01, rngs=rngs)

    def __call__(
        self,
        x: Num[Array, "b *s"],
        keys: Shaped[Array, "b"] | None = None,
        mask: Mask = None,
    ) -> Float[Array, "b c"]:
        """Return the logits of each row.

        Raises:
            DataError: if the images have another shape.
            LossError: if the network trains with dropout and `keys` is None.
        """
        keys = drawn_from(keys, self.dropout, train=not self.deterministic)
        x = as_images(x, self.image, self.stem.kernel[...].dtype, mask, self.pixels)
        x = self.norm(self.stem(x), mask)
        if self.pools:
            x = max_pool(x, 3, 2, 1)
        x = self.placement.constrain(jax.nn.relu(x), *DIMS)  # after the pool: it changes no order
        for block in self.blocks:
            x = block(x, mask)
        x = at_least_f32(x).mean((1, 2)).astype(x.dtype)
        x = drop(self.placement.constrain(x, "batch", "channels"), self.dropout, keys)
        return self.placement.constrain(self.head(x), "batch", "classes")


class ResidualBlock(nnx.Module):
    """Convolutions, each with a norm, added to the block's input; ReLU between and after."""

    def __init__(
        self,
        inputs: int,
        width: int,
        *,
        stride: int,
        bottleneck: bool,
        quiet: bool,
        make_norm: MakeNorm,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.placement = placement
        self.outputs = width * (4 if bottleneck else 1)
        # Inputs, outputs, kernel and stride of each convolution.
        basic = [(inputs, width, 3, stride), (width, width, 3, 1)]
        narrow = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        layers = narrow if bottleneck else basic
        self.convolutions = nnx.List(
            Convolution(a, b, kernel, stride=by, rngs=rngs) for a, b, kernel, by in layers
        )
        self.norms = nnx.List(make_norm(layer[1]) for layer in layers[:-1])
        self.norms.append(make_norm(self.outputs, scale=0.0 if quiet else 1.0))
        same = inputs == self.outputs and stride == 1
        self.short = (
            None if same else Convolution(inputs, self.outputs, 1, stride=stride, rngs=rngs)
        )
        self.norm_short = None if same else make_norm(self.outputs)

    def __call__(self, x: Float[Array, "b h w i"], mask: Mask) -> Float[Array, "b y x o"]:
        """Return ReLU of the sum of both branches."""
        y = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = y if convolution is self.convolutions[0] else jax.nn.relu(y)
            y = self.placement.constrain(norm(convolution(y), mask), *DIMS)
        if self.short is not None and self.norm_short is not None:
            x = self.norm_short(self.short(x), mask)
        return self.placement.constrain(jax.nn.relu(x + y), *DIMS)
