"""The config of a vision transformer; importing it imports no flax."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.errors import ConfigError
from jtrain.models.layers.image_classes import check_sizes
from jtrain.models.presets.vision import VIT_PRESETS, ViTPreset, with_preset


@configclass
class ViT:
    """A vision transformer: patches with learned positions, pre-LayerNorm, exact GELU.

    Source: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = VIT_PRESETS

    kind: Literal["vit"] = "vit"
    preset: ViTPreset = "none"
    """A published model whose values are the defaults; values given beside it win."""
    image: tuple[int, int, int] = (0, 0, 0)
    """Height, width and channels of the images; 0: those of the data."""
    patch: int = Field(default=4, gt=0)
    """Height and width of a patch; must divide those of the image."""
    layers: int = Field(default=6, gt=0)
    """Blocks of attention and MLP."""
    heads: int = Field(default=4, gt=0)
    """Attention heads a block; must divide `width`."""
    width: int = Field(default=128, gt=0)
    """Width of a position between blocks; the MLPs are 4 times as wide."""
    pool: Literal["class", "mean"] = "class"
    """Input of the head: a class token put before the patches, or the mean of the patches."""
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0: the classes of the data."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate after the embedding, each attention and each MLP."""

    couples = "nothing"

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        return with_preset(given, VIT_PRESETS)

    @model_validator(mode="after")
    def _check_sizes(self) -> "ViT":
        height, width, _ = self.image
        if self.width % self.heads:
            nearest = _nearest(self.heads, lambda n: self.width % n == 0, self.width)
            raise ConfigError(
                f"{self.heads} heads do not divide width {self.width}. Nearest: heads={nearest}."
            )
        if height % self.patch or width % self.patch:
            nearest = _nearest(
                self.patch, lambda n: height % n == width % n == 0, max(height, width)
            )
            raise ConfigError(
                f"patches of {self.patch} x {self.patch} do not divide an image of {height} x "
                f"{width}. Nearest: patch={nearest}."
            )
        return self

    @property
    def positions(self) -> int:
        """Number of patches, plus 1 for a class token."""
        height, width, _ = self.image
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
        from jtrain.models.networks.vit import ViTModule

        return from_nnx(
            lambda rngs: ViTModule(
                image=self.image,
                patch=self.patch,
                layers=self.layers,
                heads=self.heads,
                width=self.width,
                pool=self.pool,
                classes=self.classes,
                dropout=self.dropout,
                positions=self.positions,
                placement=placement,
                rngs=rngs,
            )
        )


def _nearest(wanted: int, fits: Any, most: int) -> int:
    return min((n for n in range(1, most + 1) if fits(n)), key=lambda n: abs(n - wanted))
