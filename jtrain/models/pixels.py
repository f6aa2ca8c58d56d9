"""The config of what happens to images before a network, as published models need."""

from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError


@configclass
class Pixels:
    """Size, channels and range of the images that a network gets; by default those of the data.

    The change is part of the model, so that evaluation, `predict` and exports have it too.
    """

    height: int = Field(default=0, ge=0)
    """Height to which images are resized, bilinear and smoothed where it is smaller; 0: theirs."""
    width: int = Field(default=0, ge=0)
    """Width to which images are resized; 0: theirs."""
    channels: int = Field(default=0, ge=0)
    """Channels of the network: a grey image is repeated; 0: those of the images."""
    mean: tuple[float, ...] = ()
    """Number that is subtracted in each channel, of images in 0 .. 1; empty: nothing."""
    std: tuple[float, ...] = ()
    """Number by which each channel is divided after that; empty: nothing."""

    @model_validator(mode="after")
    def _check_pairs(self) -> "Pixels":
        if bool(self.height) != bool(self.width):
            side = self.height or self.width
            raise ConfigError(
                f"images are resized to a height and a width, and only one of height={self.height} "
                f"width={self.width} is given. Set both, such as height={side} width={side}."
            )
        if len(self.mean) != len(self.std) or not all(self.std):
            raise ConfigError(
                f"mean={list(self.mean)} and std={list(self.std)} should have a number for each "
                f"channel, and std none of 0. Give both, such as mean=[0.5] std=[0.5], or neither."
            )
        return self

    def shape(self, image: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return height, width and channels of what the network gets of an image.

        Raises:
            ConfigError: if the channels of the images cannot become those of the network, or there
                is not one mean for each of them.
        """
        height, width, channels = image
        found = self.channels or channels
        if channels and found != channels and channels != 1:
            raise ConfigError(
                f"the network takes {found} channels and the images have {channels}; only grey "
                f"images become others. Set data.channels={found}, or give images of that many."
            )
        if found and len(self.mean) not in (0, found):
            raise ConfigError(
                f"model.pixels.mean has {len(self.mean)} numbers for {found} channels. Give one "
                f"for each, as model.pixels.mean={list(self.mean[:1]) * found}, and as many to "
                f"model.pixels.std."
            )
        return self.height or height, self.width or width, found
