"""The config of residual networks; importing it imports no flax."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import RowsInteract
from jtrain.errors import ConfigError
from jtrain.models.images import ImageClassifier, Pixels, check_sizes
from jtrain.models.presets import RESNET_PRESETS, ResNetPreset, nearest_divisor


@configclass
class ResNet(ImageClassifier):
    """A residual network; the first block of each stage after the first halves height and width.

    Source: He et al. 2016, https://arxiv.org/abs/1512.03385; in a bottleneck the 3x3 convolution
    has the stride, as in torchvision and timm.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = RESNET_PRESETS

    kind: Literal["resnet"] = "resnet"
    preset: ResNetPreset = "none"
    """A published model whose values are the defaults; values given beside it win."""
    pretrained: str = Field(default="", validation_alias="from")
    """A folder as Hugging Face lays it out: a new run takes its weights, and its values where none
    are given beside it. In Python: pretrained=PATH. Empty: none."""
    image: tuple[int, int, int] = (0, 0, 0)
    """Height, width and channels of the images; 0: those of the data."""
    pixels: Pixels = Pixels()
    """Size, channels and range of what the network gets of an image."""
    blocks: tuple[Annotated[int, Field(gt=0)], ...] = Field(default=(2, 2, 2, 2), min_length=1)
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
    statistics: Literal["batch", "running"] = "batch"
    """Statistics of a batch norm in training: those of the batch, which couples its rows, or the
    running ones, which then stay as they are."""
    quiet: bool = False
    """Start each block as the identity, the last norm's scale at 0 (arXiv 1706.02677)."""
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0: the classes of the data."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the inputs of the linear map to the logits."""

    @model_validator(mode="after")
    def _check_groups(self) -> "ResNet":
        if self.norm == "group" and self.width % self.groups:
            nearest = nearest_divisor(self.width, self.groups)
            raise ConfigError(
                f"the {self.width} channels of the first stage do not divide into {self.groups} "
                f"groups. Nearest: groups={nearest}."
            )
        self.pixels.shape(self.image)
        return self

    @property
    def stem_side(self) -> int:
        """Height and width of the windows of the first convolution."""
        return 7 if self.stem == "imagenet" else 3

    @property
    def rows_interact(self) -> RowsInteract:
        """The coupling of rows, for the experiment's loss: batch norm couples the batch."""
        coupled = self.norm == "batch" and self.statistics == "batch"
        return "batch" if coupled else "never"

    def build(self, placement: Placement = Unplaced()) -> Model:
        """Build the model: `apply(params, extra, image, mask=mask, rng=keys)`.

        Images are b h w c, and the result logits b c. uint8 is scaled to 0 .. 1. `keys` are those
        of the rows (`jtrain.row_keys`), for dropout. With batch norm `extra` holds the running
        statistics. In training the statistics are those of the rows that `mask` (b) shows, or of
        all, and are returned as Means: a stateful loss returns them unchanged, and declares
        `rows_interact=config.rows_interact`.

        Raises:
            ConfigError: if `image` or `classes` is still 0.
        """
        check_sizes(self.kind, self.image, self.classes)
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built
        from jtrain.models.networks.classifiers import ResNetModule

        return from_nnx(lambda rngs: ResNetModule(self, placement, rngs))
