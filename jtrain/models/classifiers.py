"""Configs of classifiers: an MLP, a small CNN, ResNet, EfficientNet-lite and ViT; no flax."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import RowsInteract
from jtrain.errors import ConfigError
from jtrain.models.encoder import EncoderBlocks
from jtrain.models.experts import Activation
from jtrain.models.images import Pixels
from jtrain.models.presets import EFFICIENTNET_LITE_PRESETS, check_heads, nearest_divisor
from jtrain.models.published import Published, build_network

Size = Annotated[int, Field(gt=0)]
Stages = tuple[Size, Size, Size, Size, Size, Size, Size]


@configclass
class Classifier:
    """Base of the configs of classifiers."""

    kind: str = ""
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0: the classes of the data."""


@configclass
class MLP(Classifier):
    """A multilayer perceptron: linear maps with ReLU between them."""

    kind: Literal["mlp"] = "mlp"
    network = "classifiers:MLPModule"
    inputs: int = Field(default=0, ge=0)
    """Numbers a row, such as an image's pixels; 0: those of the data."""
    widths: tuple[Size, ...] = (512, 512)
    """Width of each hidden layer; none: a linear classifier."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the hidden layers."""

    def build(self, placement: Placement = Unplaced()) -> Model:
        """Build the model: `apply(params, {}, x, rng=keys)`.

        Rows b ... are flattened, and the result is logits b c. uint8 is scaled to 0 .. 1. `keys`
        are those of the rows (`jtrain.row_keys`), for dropout.

        Raises:
            ConfigError: if `inputs` or `classes` is still 0.
        """
        if not self.inputs or not self.classes:
            raise ConfigError(
                f"an mlp of inputs={self.inputs} and classes={self.classes} has no size: the "
                f"experiment did not say what its data has. Set model.inputs and model.classes."
            )
        return build_network(self, placement)


@configclass
class ImageModel(Classifier):
    """Base of the configs of classifiers of images."""

    image: tuple[int, int, int] = (0, 0, 0)
    """Height, width and channels of the images; 0: those of the data."""

    def build(self, placement: Placement = Unplaced()) -> Model:
        """Build the model: `apply(params, extra, image, mask=mask, rng=keys)`.

        Images are b h w c, and the result logits b c. uint8 is scaled to 0 .. 1. `keys` are those
        of the rows (`jtrain.row_keys`), for dropout; `mask` (b) may be left out. With batch norm
        `extra` holds the running statistics. In training the statistics are those of the rows that
        the mask shows, or of all, and are returned as Means: a stateful loss returns them
        unchanged, and declares `rows_interact=config.rows_interact`.

        Raises:
            ConfigError: if `image` or `classes` is still 0.
        """
        if 0 in self.image or not self.classes:
            raise ConfigError(
                f"a {self.kind} of image={list(self.image)} and classes={self.classes} has no "
                f"size: the experiment did not say what its data has. Set "
                f"model.image=[height,width,channels] and model.classes."
            )
        return build_network(self, placement)


@configclass
class CNN(ImageModel):
    """Convolutions, each with ReLU and a 2x2 max pool, then linear maps with ReLU between them."""

    kind: Literal["cnn"] = "cnn"
    network = "classifiers:CNNModule"
    channels: tuple[Size, ...] = Field(default=(32, 64), min_length=1)
    """Outputs of each convolution."""
    kernel: int = Field(default=3, gt=0)
    """Height and width of the convolutions' kernels."""
    widths: tuple[Size, ...] = ()
    """Width of each hidden layer between the last pool and the logits."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the inputs of each linear map."""

    rows_interact = "never"

    @model_validator(mode="after")
    def _check_pools(self) -> "CNN":
        height, width, _ = self.image
        halvings = len(self.channels)
        if 0 < height < 2**halvings or 0 < width < 2**halvings:
            most = min(height or width, width or height).bit_length() - 1
            advice = f"At most {most}: model.channels={list(self.channels[: max(most, 1)])}."
            raise ConfigError(
                f"{halvings} convolutions halve an image of {height} x {width} to nothing. "
                f"{advice if most else 'Take larger images.'}"
            )
        return self


@configclass
class ImageClassifier(ImageModel, Published):
    """Base of the configs of published classifiers of images."""

    preset: str = "none"
    """A published model whose values are the defaults; values given beside it win."""
    pixels: Pixels = Pixels()
    """Size, channels and range of what the network gets of an image."""

    stem_side = 3
    """Height and width of the windows of the first convolution."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of what the network gets."""
        return self.pixels.shape(self.image)

    @model_validator(mode="after")
    def _check_pixels(self) -> "ImageClassifier":
        self.pixels.shape(self.image)
        return self

    def with_sizes_of(self, shape_of: Callable[[str], tuple[int, ...]]) -> "ImageClassifier":
        """Fill in classes, and an image that the config lacks, from the leaves of a checkpoint.

        Height and width, on which no parameter depends, are then those of ImageNet.

        Args:
            shape_of: of a leaf by name; that of a kernel may also be (inputs, outputs).
        """
        channels = math.prod(shape_of("stem/kernel")[:-1]) // self.stem_side**2
        image = self.image if 0 not in self.image else (224, 224, channels)
        return dataclasses.replace(self, image=image, classes=shape_of("head/bias")[0])


@configclass
class BatchNormClassifier(ImageClassifier):
    """Base of the configs of convolutional networks with batch norm."""

    statistics: Literal["batch", "running"] = "batch"
    """Statistics of a batch norm in training: those of the batch, which couples its rows, or the
    running ones, which then stay as they are."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the inputs of the linear map to the logits."""

    @property
    def rows_interact(self) -> RowsInteract:
        """The coupling of rows, for the experiment's loss: batch norm couples the batch."""
        return "batch" if self.statistics == "batch" else "never"


_IMAGENET = {"image": (224, 224, 3), "classes": 1000}


@configclass
class ResNet(BatchNormClassifier):
    """A residual network; the first block of each stage after the first halves height and width.

    Source: He et al. 2016, https://arxiv.org/abs/1512.03385; in a bottleneck the 3x3 convolution
    has the stride, as in torchvision and timm.
    """

    # He et al. 2016, https://arxiv.org/abs/1512.03385, table 1
    presets: ClassVar[Mapping[str, Any]] = {
        "resnet18": {**_IMAGENET, "blocks": (2, 2, 2, 2)},
        "resnet34": {**_IMAGENET, "blocks": (3, 4, 6, 3)},
        "resnet50": {**_IMAGENET, "blocks": (3, 4, 6, 3), "bottleneck": True},
    }

    kind: Literal["resnet"] = "resnet"
    network = "classifiers:ResNetModule"
    preset: Literal["none", "resnet18", "resnet34", "resnet50"] = "none"
    blocks: tuple[Size, ...] = Field(default=(2, 2, 2, 2), min_length=1)
    """Blocks in each stage; a stage is twice as wide as the one before."""
    bottleneck: bool = False
    """A block of 1x1, 3x3 and 1x1 convolutions, the last 4 times as wide; false: two 3x3."""
    width: int = Field(default=64, gt=0)
    """Channels of the first stage."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """First layers: 7x7 and a 3x3 max pool, both with stride 2, or one 3x3 with stride 1."""
    norm: Literal["batch", "group"] = "batch"
    """The norm: `batch` couples the rows of a batch, `group` does not."""
    groups: int = Field(default=32, gt=0)
    """Groups of channels of a group norm; no meaning for batch norm."""
    quiet: bool = False
    """Start each block as the identity, the last norm's scale at 0 (arXiv 1706.02677)."""

    @model_validator(mode="after")
    def _check_groups(self) -> "ResNet":
        if self.norm == "group" and self.width % self.groups:
            nearest = nearest_divisor(self.width, self.groups)
            raise ConfigError(
                f"the {self.width} channels of the first stage do not divide into {self.groups} "
                f"groups. Nearest: groups={nearest}."
            )
        return self

    @property
    def stem_side(self) -> int:
        """Height and width of the windows of the first convolution."""
        return 7 if self.stem == "imagenet" else 3

    @property
    def rows_interact(self) -> RowsInteract:
        """The coupling of rows, for the experiment's loss: batch norm couples the batch."""
        return super().rows_interact if self.norm == "batch" else "never"


@configclass
class EfficientNetLite(BatchNormClassifier):
    """An EfficientNet without squeeze-and-excitation and with ReLU6; the defaults are lite0.

    Sources: Tan and Le 2019, https://arxiv.org/abs/1905.11946; the lite variants are those of
    github.com/tensorflow/tpu, models/official/efficientnet/lite.
    """

    presets: ClassVar[Mapping[str, Any]] = EFFICIENTNET_LITE_PRESETS

    kind: Literal["efficientnet_lite"] = "efficientnet_lite"
    network = "classifiers:EfficientNetLiteModule"
    preset: Literal["none", "lite0", "lite1", "lite2", "lite3", "lite4"] = "none"
    stem: int = Field(default=32, gt=0)
    """Channels of the first convolution."""
    widths: Stages = (16, 24, 40, 80, 112, 192, 320)
    """Channels of each of the seven stages."""
    blocks: Stages = (1, 2, 2, 3, 3, 4, 1)
    """Blocks in each stage."""
    features: int = Field(default=1280, gt=0)
    """Channels of the last convolution, whose mean the head reads."""


@configclass
class ViT(EncoderBlocks, ImageClassifier):
    """A vision transformer: patches with learned positions, pre-LayerNorm, exact GELU.

    Source: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929.
    """

    # Of the small one: Touvron et al. 2021, https://arxiv.org/abs/2012.12877, table 1.
    presets: ClassVar[Mapping[str, Any]] = {
        "vit-s16": {**_IMAGENET, "patch": 16, "layers": 12, "heads": 6, "width": 384},
        "vit-b16": {**_IMAGENET, "patch": 16, "layers": 12, "heads": 12, "width": 768},
    }

    kind: Literal["vit"] = "vit"
    network = "encoder:ViTModule"
    preset: Literal["none", "vit-s16", "vit-b16"] = "none"
    patch: int = Field(default=4, gt=0)
    """Height and width of a patch; must divide those of the image."""
    layers: int = Field(default=6, gt=0)
    """Blocks of attention and MLP."""
    heads: int = Field(default=4, gt=0)
    """Attention heads a block; must divide `width`."""
    width: int = Field(default=128, gt=0)
    """Width of a position between blocks."""
    hidden: int = Field(default=0, ge=0)
    """Hidden width of the MLPs; 0: 4 x width."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Number added to the variance in a norm."""
    pool: Literal["class", "mean"] = "class"
    """Input of the head: a class token put before the patches, or the mean of the patches."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate after the embedding, each attention and each MLP."""

    rows_interact = "never"
    activation: ClassVar[Activation] = "gelu_exact"

    @model_validator(mode="after")
    def _check_sizes(self) -> "ViT":
        height, width, _ = self.shape
        check_heads(self.width, self.heads)
        if height % self.patch or width % self.patch:
            nearest = nearest_divisor(math.gcd(height, width), self.patch)
            raise ConfigError(
                f"patches of {self.patch} x {self.patch} do not divide an image of {height} x "
                f"{width}. Nearest: patch={nearest}."
            )
        return self

    def with_sizes_of(self, shape_of: Callable[[str], tuple[int, ...]]) -> "ViT":
        """Fill in classes, and a square image if the config lacks one, from a checkpoint's leaves.

        Raises:
            ConfigError: if the positions are those of no square.
        """
        image, classes = self.image, shape_of("head/bias")[0]
        if 0 in image:
            patches = shape_of("positions")[0] - (self.pool == "class")
            side = self.patch * math.isqrt(patches)
            narrow, wide = sorted(shape_of("patches/kernel"))  # LoRA's may be transposed
            inputs = narrow if wide == self.width else wide
            image = (side, side, inputs // self.patch**2)
            # With `pixels` the patches are those of the resized image.
            if math.isqrt(patches) ** 2 != patches and not self.pixels.height:
                raise ConfigError(
                    f"a vit of {patches} patches was trained on images that are not squares, and "
                    f"its config does not say which: set model.image=[height,width,channels]."
                )
        return dataclasses.replace(self, image=image, classes=classes)

    @property
    def positions(self) -> int:
        """Number of patches, plus 1 for a class token."""
        height, width, _ = self.shape
        return (height // self.patch) * (width // self.patch) + (self.pool == "class")
