"""Images in, classes out: checks of input images, and the predictions of a classifier."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from jtrain.errors import ConfigError, DataError
from jtrain.models.pixels import Pixels


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


def check_sizes(kind: str, image: tuple[int, int, int], classes: int) -> None:
    """Raise unless the sizes of the model are known.

    Raises:
        ConfigError: if a size is still 0.
    """
    if 0 in image or not classes:
        raise ConfigError(
            f"a {kind} of image={list(image)} and classes={classes} has no size: the experiment "
            f"did not say what its data has. Set model.image=[height,width,channels] and "
            f"model.classes."
        )
