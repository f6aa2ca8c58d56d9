"""Networks that classify rows: an MLP, a small CNN, ResNet and EfficientNet-lite."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Num, Shaped

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.errors import DataError
from jtrain.models.classifiers import CNN, MLP, EfficientNetLite, ResNet
from jtrain.models.images import as_images
from jtrain.models.layers.convolution import Convolution, DepthwiseConvolution, max_pool
from jtrain.models.layers.dropout import drawn_from, drop
from jtrain.models.layers.linear import Linear
from jtrain.models.layers.norms import BatchNorm, GroupNorm

DIMS = ("batch", "height", "width", "channels")
Keys: TypeAlias = Shaped[Array, "b"] | None
Mask: TypeAlias = Bool[Array, "b"] | None
MakeNorm: TypeAlias = Callable[..., BatchNorm | GroupNorm]  # (channels, *, scale=1.0)


class MLPModule(nnx.Module):
    """Rows of numbers to logits."""

    def __init__(self, config: MLP, placement: Placement, rngs: nnx.Rngs):
        self.config, self.placement = config, placement
        self.deterministic = True
        self.layers = nnx.List(
            Linear(before, after, std=_he(before), rngs=rngs)
            for before, after in itertools.pairwise((config.inputs, *config.widths, config.classes))
        )

    def __call__(self, x: Num[Array, "b *s"], keys: Keys = None) -> Float[Array, "b c"]:
        """Return the logits of each row; raise DataError unless it holds `inputs` numbers."""
        size, rate = math.prod(x.shape[1:]), self.config.dropout
        if size != self.config.inputs:
            raise DataError(
                f"rows of shape {list(x.shape[1:])} hold {size} numbers, and the "
                f"model takes {self.config.inputs}. Set model.inputs={size}."
            )
        keys = drawn_from(keys, rate, train=not self.deterministic)
        dtype = self.layers[0].kernel[...].dtype
        x = x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)
        x = x.reshape(x.shape[0], -1)
        for site, layer in enumerate(self.layers[:-1]):
            x = self.placement.constrain(jax.nn.relu(layer(x)), "batch", "hidden")
            x = drop(x, rate, keys, site=site)
        return self.placement.constrain(self.layers[-1](x), "batch", "classes")


class CNNModule(nnx.Module):
    """Images to logits: convolutions, then linear maps."""

    def __init__(self, config: CNN, placement: Placement, rngs: nnx.Rngs):
        self.config, self.placement = config, placement
        self.deterministic = True
        height, width, inputs = config.image
        channels, kernel = config.channels, config.kernel
        self.convolutions = nnx.List(
            Convolution(a, b, kernel, bias=True, std=_he(a * kernel**2), rngs=rngs)
            for a, b in itertools.pairwise((inputs, *channels))
        )
        halved = 2 ** len(channels)
        flat = (height // halved) * (width // halved) * channels[-1]
        self.layers = nnx.List(
            Linear(a, b, std=_he(a), rngs=rngs)
            for a, b in itertools.pairwise((flat, *config.widths, config.classes))
        )

    def __call__(
        self, x: Num[Array, "b *s"], keys: Keys = None, mask: Mask = None
    ) -> Float[Array, "b c"]:
        """Return the logits of each row; raise DataError if the images have another shape."""
        rate = self.config.dropout
        keys = drawn_from(keys, rate, train=not self.deterministic)
        x = as_images(x, self.config.image, self.layers[0].kernel[...].dtype, mask)
        for layer in self.convolutions:
            # ReLU changes no order, so it can come after the pool, on a quarter of the numbers.
            x = jax.nn.relu(layer(x, pool=2))
            x = self.placement.constrain(x, *DIMS)
        x = drop(x.reshape(x.shape[0], -1), rate, keys)
        for site, layer in enumerate(self.layers[:-1], 1):
            x = self.placement.constrain(jax.nn.relu(layer(x)), "batch", "hidden")
            x = drop(x, rate, keys, site=site)
        return self.placement.constrain(self.layers[-1](x), "batch", "classes")


def _he(inputs: int) -> float:
    """Return the deviation of a kernel before a ReLU: He et al. 2015."""
    return math.sqrt(2 / inputs)


class _ConvolutionalModule(nnx.Module):
    """Images to logits: a stem and blocks (`_channels`), the mean over the image, a linear map."""

    stem: Convolution
    head: Linear

    def __init__(self, config: ResNet | EfficientNetLite, placement: Placement):
        self.config, self.placement = config, placement
        self.deterministic = True

    def _channels(self, x: Float[Array, "b h w i"], mask: Mask) -> Float[Array, "b y x o"]:
        """Return the channels whose mean the head reads."""
        raise NotImplementedError

    def __call__(
        self, x: Num[Array, "b *s"], keys: Keys = None, mask: Mask = None
    ) -> Float[Array, "b c"]:
        """Return the logits of each row; raise DataError if the images have another shape."""
        config = self.config
        keys = drawn_from(keys, config.dropout, train=not self.deterministic)
        x = as_images(x, config.image, self.stem.kernel[...].dtype, mask, config.pixels)
        x = self._channels(x, mask)
        x = at_least_f32(x).mean((1, 2)).astype(x.dtype)
        x = drop(self.placement.constrain(x, "batch", "channels"), config.dropout, keys)
        return self.placement.constrain(self.head(x), "batch", "classes")


class ResNetModule(_ConvolutionalModule):
    """A residual network."""

    def __init__(self, config: ResNet, placement: Placement, rngs: nnx.Rngs):
        super().__init__(config, placement)
        make_norm = (
            functools.partial(BatchNorm, frozen=config.statistics == "running")
            if config.norm == "batch"
            else functools.partial(GroupNorm, groups=config.groups)
        )
        self.pools = config.stem == "imagenet"
        kernel, stride = (7, 2) if self.pools else (3, 1)
        channels = config.width
        self.stem = Convolution(config.shape[2], channels, kernel, stride=stride, rngs=rngs)
        self.norm = make_norm(channels)
        self.blocks = nnx.List()
        for stage, count in enumerate(config.blocks):
            for index in range(count):
                sizes = channels, config.width * 2**stage, 2 if stage and not index else 1
                block = ResidualBlock(config, placement, sizes, make_norm, rngs)
                self.blocks.append(block)
                channels = block.outputs
        self.head = Linear(channels, config.classes, std=0.01, rngs=rngs)

    def _channels(self, x: Float[Array, "b h w i"], mask: Mask) -> Float[Array, "b y x o"]:
        """Apply the stem and the blocks."""
        x = self.norm(self.stem(x), mask)
        if self.pools:
            x = max_pool(x, 3, 2, 1)
        x = self.placement.constrain(jax.nn.relu(x), *DIMS)  # after the pool: it changes no order
        for block in self.blocks:
            x = block(x, mask)
        return x


class ResidualBlock(nnx.Module):
    """Convolutions, each with a norm, added to the block's input; ReLU between and after.

    Args:
        sizes: inputs, width and stride.
    """

    def __init__(
        self,
        config: ResNet,
        placement: Placement,
        sizes: tuple[int, int, int],
        make_norm: MakeNorm,
        rngs: nnx.Rngs,
    ):
        self.placement = placement
        inputs, width, stride = sizes
        self.outputs = width * (4 if config.bottleneck else 1)
        # Inputs, outputs, kernel and stride of each convolution.
        basic = [(inputs, width, 3, stride), (width, width, 3, 1)]
        narrow = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        layers = narrow if config.bottleneck else basic
        self.convolutions = nnx.List(
            Convolution(a, b, kernel, stride=by, rngs=rngs) for a, b, kernel, by in layers
        )
        self.norms = nnx.List(make_norm(layer[1]) for layer in layers[:-1])
        self.norms.append(make_norm(self.outputs, scale=0.0 if config.quiet else 1.0))
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


EPSILON = 1e-3  # of every norm of an EfficientNet-lite, as published
KERNELS = (3, 3, 5, 3, 5, 5, 3)  # of the stages
STRIDES = (1, 2, 2, 2, 1, 2, 1)  # of the first block of each stage
EXPANSION = 6  # of the channels inside of a block, but in the first stage


class EfficientNetLiteModule(_ConvolutionalModule):
    """An EfficientNet-lite."""

    def __init__(self, config: EfficientNetLite, placement: Placement, rngs: nnx.Rngs):
        super().__init__(config, placement)
        frozen = config.statistics == "running"
        make_norm = functools.partial(BatchNorm, epsilon=EPSILON, frozen=frozen)
        channels = config.stem
        self.stem = Convolution(config.shape[2], channels, 3, stride=2, same=True, rngs=rngs)
        self.norm = make_norm(channels)
        self.blocks = nnx.List()
        for stage, (width, count) in enumerate(zip(config.widths, config.blocks, strict=True)):
            for index in range(count):
                stride = 1 if index else STRIDES[stage]
                sizes = channels, width, EXPANSION if stage else 1, KERNELS[stage], stride
                block = InvertedBlock(placement, sizes, make_norm, rngs)
                self.blocks.append(block)
                channels = width
        self.features = Convolution(channels, config.features, 1, rngs=rngs)
        self.norm_features = make_norm(config.features)
        self.head = Linear(config.features, config.classes, std=0.01, rngs=rngs)

    def _channels(self, x: Float[Array, "b h w i"], mask: Mask) -> Float[Array, "b y x o"]:
        """Apply the stem, the blocks and the last convolution."""
        x = self.placement.constrain(jax.nn.relu6(self.norm(self.stem(x), mask)), *DIMS)
        for block in self.blocks:
            x = block(x, mask)
        x = jax.nn.relu6(self.norm_features(self.features(x), mask))
        return self.placement.constrain(x, *DIMS)


class InvertedBlock(nnx.Module):
    """A wide depthwise convolution between two 1x1 ones, added to its input where both are alike.

    The last norm has no activation.

    Args:
        sizes: inputs, outputs, expansion, kernel and stride.
    """

    def __init__(
        self,
        placement: Placement,
        sizes: tuple[int, int, int, int, int],
        make_norm: MakeNorm,
        rngs: nnx.Rngs,
    ):
        self.placement = placement
        inputs, outputs, expansion, kernel, stride = sizes
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
