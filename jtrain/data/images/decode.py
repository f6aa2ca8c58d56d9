"""Pixels of one image file; needs `pip install 'jtrain[images]'`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jtrain.data.sources.optional_import import needed
from jtrain.errors import DataError

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # 8 bits or fewer
BICUBIC = 3  # Image.Resampling.BICUBIC, which cannot be named before Pillow is imported
FORMATS = ("JPEG", "PNG")
PIXELS = 1 << 26  # that an image may have: 64 times 1024 x 1024
MOST_PIXELS = 89_478_485  # above, Pillow warns of a decompression bomb


@dataclass(frozen=True, kw_only=True)
class ImageSize:
    """What every image becomes."""

    height: int
    width: int
    channels: Literal[1, 3] = 3
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image of another shape fits: what sticks out is cut off, what is missing is black, or
    it is squashed."""
    pixels: int = PIXELS
    """Pixels above which a file is refused before it is decoded."""


def decode_image(path: Path, size: ImageSize) -> np.ndarray:  # uint8, h w c
    """Return the image in a JPEG or PNG file, upright, of one size.

    Grey, palette, transparent (the transparency is left out) and CMYK images become RGB, or grey
    with one channel. A resize averages over the pixels that fall together (bicubic, antialiased).
    The same bytes give the same pixels with the same version of Pillow.

    Raises:
        DataError: a file that cannot be opened, is cut off, damaged or of another kind, has more
            than `size.pixels`, or more than 8 bits a channel; Pillow is not installed.
    """
    pillow = needed("PIL.Image", "images", "An image file")
    try:
        # Opened here: Pillow leaves a file open that it was given by name and could not read.
        with path.open("rb") as file, pillow.open(file, formats=FORMATS) as image:
            _check(path, image, size)
            return _pixels(image, size)
    except DataError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _too_large(path, f"more than {MOST_PIXELS:,} pixels", size) from error
    except pillow.UnidentifiedImageError as error:
        raise DataError(
            f"{path} was to be a JPEG or PNG image and is none: it {_begins(path)}. "
            f"Remove it, or write it again as one of the two."
        ) from error
    except Exception as error:  # of a damaged file Pillow raises a dozen kinds
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(
                f"{path} was to be read and cannot be ({os.strerror(error.errno)}). Give yourself "
                f"the right to read it (chmod u+r), or remove it."
            ) from error
        raise DataError(
            f"{path} was to be a whole image and is not ({error or type(error).__name__}). It is "
            f"cut off or damaged: get it again, or remove it; or leave such images out: "
            f"data.damaged=skip."
        ) from error


def _check(path: Path, image: Any, size: ImageSize) -> None:
    """Raise DataError for what is not to be decoded, by the header alone."""
    width, height = image.size
    if width * height > size.pixels:
        raise _too_large(path, f"{width} x {height} = {width * height:,} pixels", size)
    if image.mode not in MODES:
        raise DataError(
            f"{path} was to have at most 8 bits a channel and is of Pillow's mode {image.mode}, "
            f"which would be cut to 8. Convert it by a scale of your own, or remove it."
        )


def _pixels(image: Any, size: ImageSize) -> np.ndarray:  # uint8, h w c
    operations = needed("PIL.ImageOps", "images", "An image file")
    mode, wanted = ("L" if size.channels == 1 else "RGB"), (size.width, size.height)
    # A JPEG can be decoded at 1/2, 1/4 or 1/8: as small as is still twice as large as is wanted.
    image.draft(mode, (2 * max(wanted), 2 * max(wanted)))
    image = operations.exif_transpose(image)
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")  # by way of it, or Pillow warns
    if image.mode != mode:
        image = image.convert(mode)
    if image.size != wanted:
        if size.fit == "squash":
            image = image.resize(wanted, resample=BICUBIC)
        elif size.fit == "pad":
            image = operations.pad(image, wanted, method=BICUBIC)
        else:
            image = operations.fit(image, wanted, method=BICUBIC)
    return np.asarray(image, np.uint8).reshape(size.height, size.width, size.channels)


def _too_large(path: Path, found: str, size: ImageSize) -> DataError:
    allowed = size.pixels < MOST_PIXELS
    advice = f"Set data.pixels={MOST_PIXELS} if it is what it says, " if allowed else ""
    return DataError(
        f"{path} was to have at most {size.pixels:,} pixels and has {found}; a small file can say "
        f"so to fill the memory. {advice}{'or remove' if advice else 'Remove'} it, or make it "
        f"smaller beforehand."
    )


def _begins(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError:
        head = b""
    return f"begins with {head!r}" if head else "is empty"
