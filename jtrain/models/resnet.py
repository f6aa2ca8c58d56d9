"""The values of residual networks; importing them imports no flax."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import Couples
from jtrain.errors import ConfigError
from jtrain.models.layers.images import check_sizes
from jtrain.models.presets.choose import with_preset
from jtrain.models.presets.vision import RESNET_PRESETS, ResNetPreset


@configclass
class ResNet:
    """A residual network; its first block of each stage but the first halves height and width.

    Source: He et al. 2016, https://arxiv.org/abs/1512.03385; in a bottleneck the 3x3 convolution
    has the stride, as in torchvision and timm.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = RESNET_PRESETS

    kind: Literal["resnet"] = "resnet"
    preset: ResNetPreset = "none"
    """Published values to start from; others said beside it win."""
    image: tuple[int, int, int] = (0, 0, 0)
    """Height, width and channels of what comes in; 0 takes what the data has."""
    blocks: tuple[Annotated[int, Field(gt=0)], ...] = Field(default=(2, 2, 2, 2), min_length=1)
    """Blocks in each stage; a stage is twice as wide as the one before."""
    bottleneck: bool = False
    """Whether a block is 1x1, 3x3 and 1x1 convolutions, the last 4 times as wide; or two 3x3."""
    width: int = Field(default=64, gt=0)
    """Channels of the first stage."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """What comes first: 7x7 by twos and a 3x3 max pool by twos, or one 3x3 that keeps the size."""
    norm: Literal["batch", "group"] = "batch"
    """What normalises: `batch` makes the rows of a batch meet, `group` does not."""
    groups: int = Field(default=32, gt=0)
    """Groups of channels of a group norm; batch norm has none."""
    quiet: bool = False
    """Whether each block starts as the identity, the last norm's scale at 0 (arXiv 1706.02677)."""
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0 takes what the data has."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Chance that a number is dropped that enters the linear map to the logits."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return with_preset(given, RESNET_PRESETS)

    @model_validator(mode="after")
    def _groups_divide(self) -> "ResNet":
        if self.norm == "group" and self.width % self.groups:
            fits = [n for n in range(1, self.width + 1) if self.width % n == 0]
            nearest = min(fits, key=lambda n: abs(n - self.groups))
            raise ConfigError(
                f"the {self.width} channels of the first stage do not divide into {self.groups} "
                f"groups. Nearest: groups={nearest}."
            )
        return self

    @property
    def couples(self) -> Couples:
        """What an experiment says of its loss: batch norm makes rows meet."""
        return "batch" if self.norm == "batch" else "nothing"

    def build(self, place: Placement = Unplaced()) -> Model:
        """`apply(params, extra, rng, train, image, keys, mask)` gives logits b c of b h w c.

        uint8 is scaled to 0 .. 1. `keys` are the rows' (`jtrain.row_keys`), or None where nothing
        is dropped; `rng` is not used. With batch norm `extra` holds the running statistics; while
        training they are taken over the rows that `mask` (b) shows, or all, and come back as
        Means: a stateful loss returns them as they are, and says `couples=configclass.couples`.

        Raises:
            ConfigError: if `image` or `classes` is still 0.
        """
        check_sizes(self.kind, self.image, self.classes)
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built
        from jtrain.models.networks.resnet import ResNetModule

        return from_nnx(lambda rngs: ResNetModule(self, place, rngs))
