"""The network of an EfficientNet-lite."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.models.layers.batch_norm import BatchNorm
from jtrain.models.layers.convolution import Convolution, DepthwiseConvolution
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.image_classes import as_images
from jtrain.models.layers.linear import Linear
from jtrain.models.pixels import Pixels

DIMS = ("batch", "height", "width", "channels")
EPSILON = 1e-3  # of every norm, as published
KERNELS = (3, 3, 5, 3, 5, 5, 3)  # of the stages
STRIDES = (1, 2, 2, 2, 1, 2, 1)  # of the first block of each stage
EXPANSION = 6  # of the channels inside of a block, but in the first stage
Mask: TypeAlias = Bool[Array, "b"] | None
MakeNorm: TypeAlias = Callable[[int], BatchNorm]


class EfficientNetLiteModule(nnx.Module):
    """Images to logits; the arguments are the fields of `EfficientNetLite`."""

    def __init__(
        self,
        *,
        image: tuple[int, int, int],
        pixels: Pixels,
        stem: int,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        features: int,
        statistics: str,
        classes: int,
        dropout: float,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.image, self.pixels = image, pixels
        self.dropout, self.placement = dropout, placement
        self.deterministic = True
        make_norm = functools.partial(BatchNorm, epsilon=EPSILON, frozen=statistics == "running")
        inputs = pixels.shape(image)[2]
        self.stem = Convolution(inputs, stem, 3, stride=2, same=True, rngs=rngs)
        self.norm = make_norm(stem)
        self.blocks = nnx.List()
        channels = stem
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for index in range(count):
                block = InvertedBlock(
                    channels,
                    width,
                    expansion=EXPANSION if stage else 1,
                    kernel=KERNELS[stage],
                    stride=1 if index else STRIDES[stage],
                    make_norm=make_norm,
                    placement=placement,
                    rngs=rngs,
                )
                self.blocks.append(block)
                channels = width
        self.features = Convolution(channels, features, 1, rngs=rngs)
        self.norm_features = make_norm(features)
        self.head = Linear(features, classes, std=0.01, rngs=rngs)

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
        x = self.placement.constrain(jax.nn.relu6(self.norm(self.stem(x), mask)), *DIMS)
        for block in self.blocks:
            x = block(x, mask)
        x = jax.nn.relu6(self.norm_features(self.features(x), mask))
        x = self.placement.constrain(x, *DIMS)
        x = at_least_f32(x).mean((1, 2)).astype(x.dtype)
        x = drop(self.placement.constrain(x, "batch", "channels"), self.dropout, keys)
        return self.placement.constrain(self.head(x), "batch", "classes")


class InvertedBlock(nnx.Module):
    """A wide depthwise convolution between two 1x1 ones, added to its input where both are alike.

    The last norm has no activation.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        expansion: int,
        kernel: int,
        stride: int,
        make_norm: MakeNorm,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.placement = placement
        self.adds = inputs == outputs and stride == 1
        wide = inputs * expansion
        self.expand = None if expansion == 1 else Convolution(inputs, wide, 1, rngs=rngs)
        self.norm_expand = None if expansion == 1 else make_norm(wide)
        self.depthwise = DepthwiseConvolution(wide, kernel, stride=stride, rngs=rngs)
        self.norm_depthwise = make_norm(wide)
        self.project = Convolution(wide, outputs, 1, rngs=rngs)
        self.norm_project = make_norm(outputs)

    def __call__(self, x: Float[Array, "b h w i"], mask: Mask) -> Float[Array, "b y x o"]:
        """Return the block's outputs."""
        y = x
        if self.expand is not None and self.norm_expand is not None:
            y = jax.nn.relu6(self.norm_expand(self.expand(y), mask))
            y = self.placement.constrain(y, *DIMS)
        y = jax.nn.relu6(self.norm_depthwise(self.depthwise(y), mask))
        y = self.norm_project(self.project(self.placement.constrain(y, *DIMS)), mask)
        return self.placement.constrain(x + y if self.adds else y, *DIMS)
