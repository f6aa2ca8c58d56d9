"""The config of a vision transformer; importing it imports no flax."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.errors import ConfigError
from jtrain.models.experts import Activation
from jtrain.models.images import ImageClassifier, Pixels, check_sizes
from jtrain.models.presets import VIT_PRESETS, ViTPreset, check_heads, nearest_divisor


@configclass
class ViT(ImageClassifier):
    """A vision transformer: patches with learned positions, pre-LayerNorm, exact GELU.

    Source: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = VIT_PRESETS

    kind: Literal["vit"] = "vit"
    preset: ViTPreset = "none"
    """A published model whose values are the defaults; values given beside it win."""
    pretrained: str = Field(default="", validation_alias="from")
    """A folder as Hugging Face lays it out: a new run takes its weights, and its values where none
    are given beside it. In Python: pretrained=PATH. Empty: none."""
    image: tuple[int, int, int] = (0, 0, 0)
    """Height, width and channels of the images; 0: those of the data."""
    pixels: Pixels = Pixels()
    """Size, channels and range of what the network gets of an image."""
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
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0: the classes of the data."""
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

    def for_leaves(self, shape: Callable[[str], tuple[int, ...]]) -> "ViT":
        """Return the config with the sizes of trained parameters, whose shapes `shape` returns.

        Images of which the config has no size are squares.

        Raises:
            ConfigError: if their positions are those of no square.
        """
        image, classes = self.image, shape("head/bias")[0]
        if 0 in image:
            patches = shape("positions")[0] - (self.pool == "class")
            side = self.patch * math.isqrt(patches)
            narrow, wide = sorted(shape("patches/kernel"))
            inputs = narrow if wide == self.width else wide
            image = (side, side, inputs // self.patch**2)
            if math.isqrt(patches) ** 2 != patches and not self.pixels.height:
                raise ConfigError(
                    f"a vit of {patches} patches was trained on images that are no squares, and "
                    f"its config does not say which: set model.image=[height,width,channels]."
                )
        return dataclasses.replace(self, image=image, classes=classes)

    @property
    def size_of_hidden(self) -> int:
        """Hidden width of the MLPs."""
        return self.hidden or 4 * self.width

    @property
    def positions(self) -> int:
        """Number of patches, plus 1 for a class token."""
        height, width, _ = self.shape
        return (height // self.patch) * (width // self.patch) + (self.pool == "class")

    def build(self, placement: Placement = Unplaced()) -> Model:
        """Build the model: `apply(params, {}, image, mask=mask, rng=keys)`.

        Images are b h w c, and the result logits b c. uint8 is scaled to 0 .. 1. `keys` are those
        of the rows (`jtrain.row_keys`), for dropout; `mask` (b) may be left out.

        Raises:
            ConfigError: if `image` or `classes` is still 0.
        """
        check_sizes(self.kind, self.image, self.classes)
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built
        from jtrain.models.networks.encoder import ViTModule

        return from_nnx(lambda rngs: ViTModule(self, placement, rngs))
