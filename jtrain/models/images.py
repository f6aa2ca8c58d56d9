"""Images in, classes out: changes of images before a network, and configs of classifiers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError, DataError


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


def classes(logits: Float[Array, "b c"]) -> dict[str, Array]:
    """Return the likeliest class of each row, and the probability of each class.

    `label` is int32 b, `chances` float32 b c, which add up to 1.
    """
    chances = jax.nn.softmax(logits.astype(jnp.float32))
    return {"label": jnp.argmax(chances, 1).astype(jnp.int32), "chances": chances}


def as_images(
    x: Num[Array, "b *s"],
    shape: tuple[int, int, int],
    dtype: jnp.dtype,
    mask: Bool[Array, "b"] | None = None,
    pixels: Pixels = Pixels(),
) -> Float[Array, "b y x i"]:
    """Return `x` in `dtype`, uint8 scaled to 0 .. 1, zero in the rows that `mask` hides.

    Images b h w have one channel. Size, channels and range become those of `pixels`.

    Raises:
        DataError: if the shape of an image is not `shape`: height, width, channels.
    """
    if x.shape[1:] == shape[:2] and shape[2] == 1:
        x = x[..., None]
    if x.shape[1:] != shape:
        found = list(x.shape[1:]) if x.ndim == 4 else [*x.shape[1:3], 1]
        advice = f"Set model.image={found}" if x.ndim in (3, 4) else "Give rows of that shape"
        raise DataError(
            f"images of shape {list(x.shape[1:])}, and the model takes {list(shape)}: height, "
            f"width, channels, in that order. {advice}, or change the images."
        )
    x = x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)
    x = _change(x, pixels, pixels.shape(shape))
    if mask is None:
        return x
    return jnp.where(jnp.expand_dims(mask, (1, 2, 3)), x, jnp.zeros((), dtype))


def _change(
    x: Float[Array, "b h w c"], pixels: Pixels, shape: tuple[int, int, int]
) -> Float[Array, "b y x i"]:
    """Resize images, repeat a grey channel, and move the range of each channel."""
    height, width, channels = shape
    if x.shape[1:3] != (height, width):
        x = jax.image.resize(x, (len(x), height, width, x.shape[3]), "linear")
    if x.shape[3] != channels:
        x = jnp.broadcast_to(x, (*x.shape[:3], channels))
    if pixels.mean:
        mean, std = (jnp.array(numbers, x.dtype) for numbers in (pixels.mean, pixels.std))
        x = (x - jnp.expand_dims(mean, (0, 1, 2))) / jnp.expand_dims(std, (0, 1, 2))
    return x
