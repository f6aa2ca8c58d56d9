"""The config of EfficientNet-lite; importing it imports no flax."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import RowsInteract
from jtrain.models.images import ImageClassifier, Pixels, check_sizes
from jtrain.models.presets import LITE_PRESETS, LitePreset

Size = Annotated[int, Field(gt=0)]
Stages = tuple[Size, Size, Size, Size, Size, Size, Size]


@configclass
class EfficientNetLite(ImageClassifier):
    """An EfficientNet without squeeze-and-excitation and with ReLU6; the defaults are lite0.

    Sources: Tan and Le 2019, https://arxiv.org/abs/1905.11946; the lite variants are those of
    github.com/tensorflow/tpu, models/official/efficientnet/lite.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = LITE_PRESETS

    kind: Literal["efficientnet_lite"] = "efficientnet_lite"
    preset: LitePreset = "none"
    """A published model whose values are the defaults; values given beside it win."""
    pretrained: str = Field(default="", validation_alias="from")
    """A folder with a config.json and safetensors: a new run takes its weights, and its values
    where none are given beside it. In Python: pretrained=PATH. Empty: none."""
    image: tuple[int, int, int] = (0, 0, 0)
    """Height, width and channels of the images; 0: those of the data."""
    pixels: Pixels = Pixels()
    """Size, channels and range of what the network gets of an image."""
    stem: int = Field(default=32, gt=0)
    """Channels of the first convolution."""
    widths: Stages = (16, 24, 40, 80, 112, 192, 320)
    """Channels of each of the seven stages."""
    blocks: Stages = (1, 2, 2, 3, 3, 4, 1)
    """Blocks in each stage."""
    features: int = Field(default=1280, gt=0)
    """Channels of the last convolution, whose mean the head reads."""
    statistics: Literal["batch", "running"] = "batch"
    """Statistics of the norms in training: those of the batch, which couples its rows, or the
    running ones, which then stay as they are."""
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0: the classes of the data."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the inputs of the linear map to the logits."""

    @model_validator(mode="after")
    def _check_pixels(self) -> "EfficientNetLite":
        self.pixels.shape(self.image)
        return self

    @property
    def rows_interact(self) -> RowsInteract:
        """The coupling of rows, for the experiment's loss: batch norm couples the batch."""
        return "batch" if self.statistics == "batch" else "never"

    def build(self, placement: Placement = Unplaced()) -> Model:
        """Build the model: `apply(params, extra, image, mask=mask, rng=keys)`.

        Arguments and results are those of `jtrain.models.resnet.ResNet.build`.

        Raises:
            ConfigError: if `image` or `classes` is still 0.
        """
        check_sizes(self.kind, self.image, self.classes)
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built
        from jtrain.models.networks.classifiers import EfficientNetLiteModule

        return from_nnx(lambda rngs: EfficientNetLiteModule(self, placement, rngs))
