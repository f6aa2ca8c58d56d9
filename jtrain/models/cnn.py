"""The config of a small convolutional network; importing it imports no flax."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.errors import ConfigError
from jtrain.models.images import check_sizes

Size = Annotated[int, Field(gt=0)]


@configclass
class CNN:
    """Convolutions, each with ReLU and a 2x2 max pool, then linear maps with ReLU between them."""

    kind: Literal["cnn"] = "cnn"
    image: tuple[int, int, int] = (0, 0, 0)
    """Height, width and channels of the images; 0: those of the data."""
    channels: tuple[Size, ...] = Field(default=(32, 64), min_length=1)
    """Outputs of each convolution."""
    kernel: int = Field(default=3, gt=0)
    """Height and width of the convolutions' kernels."""
    widths: tuple[Size, ...] = ()
    """Width of each hidden layer between the last pool and the logits."""
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0: the classes of the data."""
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

    def build(self, placement: Placement = Unplaced()) -> Model:
        """Build the model: `apply(params, {}, image, mask=mask, rng=keys)`.

        Images are b h w c, and the result logits b c. uint8 is scaled to 0 .. 1. `keys` are those
        of the rows (`jtrain.row_keys`), for dropout; `mask` (b) may be left out.

        Raises:
            ConfigError: if `image` or `classes` is still 0.
        """
        check_sizes(self.kind, self.image, self.classes)
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built
        from jtrain.models.networks.classifiers import CNNModule

        return from_nnx(lambda rngs: CNNModule(self, placement, rngs))
