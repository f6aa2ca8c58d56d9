"""Decoding of image files; needs `pip install 'jtrain[images]'`."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from jtrain.data.images.augment import WindowDraws
from jtrain.data.sources.source import import_optional
from jtrain.errors import DataError, UnreachableError
from jtrain.io.disk_errors import attempt
from jtrain.io.regular_files import open_regular

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # 8 bits or fewer
BILINEAR, BICUBIC = 2, 3  # of Image.Resampling, without importing Pillow
ORIENTATION = 0x0112  # of EXIF
TURNED = (5, 6, 7, 8)  # orientations whose rows are columns of the upright image
MIRRORED, FLIPPED = (2, 3, 6, 7), (3, 4, 7, 8)  # those of which right is left, and bottom is top
FORMATS = ("JPEG", "PNG")
PIXELS = 1 << 26  # most pixels of an image: 64 times 1024 x 1024
MOST_PIXELS = 89_478_485  # above, Pillow warns of a decompression bomb


@dataclass(frozen=True, kw_only=True)
class ImageSize:
    """The common size of all images."""

    height: int
    width: int
    channels: Literal[1, 3] = 3
    fit: Literal["crop", "pad", "squash"] = "crop"
    """Fit of an image of another shape: cut off the edges (crop), add black edges (pad), or change
    the aspect ratio (squash)."""
    pixels: int = PIXELS
    """Pixels above which a file is rejected before it is decoded."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return self.height, self.width, self.channels


def decode_image(
    path: Path | str, size: ImageSize, content: bytes | None = None
) -> np.ndarray:  # uint8, h w c
    """Return the image in a JPEG or PNG file, upright, of one size.

    Grey, palette, transparent (the transparency is dropped) and CMYK images become RGB, or grey
    with one channel. A resize is bicubic and antialiased. The same bytes give the same pixels with
    the same version of Pillow.

    Args:
        path: the file; with `content` the name of the image in errors.
        content: the bytes of the file, if they lie elsewhere.

    Raises:
        DataError: a file that cannot be opened, is cut off, damaged or of another kind, has more
            than `size.pixels`, or more than 8 bits a channel; or Pillow is not installed.
    """
    return _decode(path, size, lambda image: _pixels(image, size), content)


def decode_window(path: Path, size: ImageSize, draws: WindowDraws) -> np.ndarray:  # uint8, h w c
    """Return a random window of the image in a JPEG or PNG file, upright, resized to `size`.

    The window is of the complete image, so `size.fit` does not matter; its shape is that of `size`
    by 3:4 to 4:3. The resize is bilinear and antialiased. A JPEG is decoded at 1/2, 1/4 or 1/8, if
    the window has then at least twice the size; every pixel is within a few levels of that of a
    full decode (measured in tests/data/test_augmented.py).

    Args:
        draws: of one row.

    Raises:
        DataError: see `decode_image`.
    """
    return _decode(path, size, lambda image: _window_pixels(image, size, draws))


def _decode(
    path: Path | str,
    size: ImageSize,
    read: Callable[[Any], np.ndarray],
    content: bytes | None = None,
) -> np.ndarray:
    """Return what `read` makes of the open image; raise a DataError that names the file."""
    pillow = import_optional("PIL.Image", "images", "An image file")
    png: Any = import_optional("PIL.PngImagePlugin", "images", "An image file")
    # A text or a colour profile may be as large as Pillow lets all texts of a PNG be, 64 MiB.
    png.MAX_TEXT_CHUNK = png.MAX_TEXT_MEMORY
    head = b""
    try:
        # Open the file here: Pillow leaves a file open that it opened by name and could not read.
        with _open(Path(path)) if content is None else io.BytesIO(content) as file:
            head = file.read(8)
            file.seek(0)
            with pillow.open(file, formats=FORMATS) as image:
                _check(path, image, size)
                return read(image)
    except (DataError, UnreachableError):
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _too_large(path, f"more than {MOST_PIXELS:,} pixels", size) from error
    except pillow.UnidentifiedImageError as error:
        raise DataError(
            f"{path} should be a JPEG or PNG image and is not: it begins with {head!r}. "
            f"Remove it, or write it again as one of the two."
        ) from error
    except Exception as error:  # Pillow raises a dozen kinds for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(
                f"{path} cannot be read ({error.strerror}). Make it readable (chmod "
                f"u+r), or remove it."
            ) from error
        raise DataError(
            f"{path} should be a complete image and is not ({error or type(error).__name__}). It "
            f"is cut off or damaged: get it again, or remove it"
            + ("; or skip such images: data.damaged=skip." if content is None else ".")
        ) from error


def _open(path: Path) -> BinaryIO:
    return attempt(path, lambda: open_regular(path))


def _check(path: Path | str, image: Any, size: ImageSize) -> None:
    """Raise DataError, by the header alone, for an image that should not be decoded."""
    width, height = image.size
    if width * height > size.pixels:
        raise _too_large(path, f"{width} x {height} = {width * height:,} pixels", size)
    # Pillow reads 16 bits of a colour as 8: the mode RGB, and what the file has is RGB;16B.
    mode = next((str(tile[-1]) for tile in image.tile if ";16" in str(tile[-1])), image.mode)
    if mode not in MODES:
        raise DataError(
            f"{path} should have at most 8 bits a channel and has Pillow's mode {mode}, which "
            f"would be cut to 8. Convert it by a scale of your own, or remove it."
        )


def _pixels(image: Any, size: ImageSize) -> np.ndarray:  # uint8, h w c
    operations = import_optional("PIL.ImageOps", "images", "An image file")
    mode, wanted = _mode(size), (size.width, size.height)
    # A JPEG can be decoded at 1/2, 1/4 or 1/8: take the smallest of at least twice the size.
    image.draft(mode, (2 * max(wanted), 2 * max(wanted)))
    image = _turn_and_convert(image, mode)
    if image.size != wanted:
        if size.fit == "squash":
            image = image.resize(wanted, resample=BICUBIC)
        elif size.fit == "pad":
            image = operations.pad(image, wanted, method=BICUBIC)
        else:
            image = operations.fit(image, wanted, method=BICUBIC)
    return np.asarray(image, np.uint8).reshape(size.height, size.width, size.channels)


def _window_pixels(image: Any, size: ImageSize, draws: WindowDraws) -> np.ndarray:  # uint8, h w c
    orientation, mode = image.getexif().get(ORIENTATION, 1), _mode(size)
    turned = orientation in TURNED
    width, height = image.size[::-1] if turned else image.size
    window = draws.windows(height, width, size.width / size.height)
    [[top, left, high, wide]] = window.tolist()
    # The size of an image whose window has twice the size: a draft is no smaller.
    twice = (2 * size.width * width / wide, 2 * size.height * height / high)
    stored_width = image.size[0]
    draft = image.draft(mode, twice[::-1] if turned else twice)  # None for a PNG
    scale = draft[1][2] / stored_width if draft else 1
    image = _turn_and_convert(image, mode)
    # The last column and row of a draft are a part of a pixel, and may come first after a turn.
    left = scale * left + (image.width - scale * width) * (orientation in MIRRORED)
    top = scale * top + (image.height - scale * height) * (orientation in FLIPPED)
    box = (left, top, min(left + scale * wide, image.width), min(top + scale * high, image.height))
    image = image.resize((size.width, size.height), resample=BILINEAR, box=box)
    return np.asarray(image, np.uint8).reshape(size.height, size.width, size.channels)


def _turn_and_convert(image: Any, mode: str) -> Any:
    """Turn an image upright by its EXIF, in place, and convert it to grey or colours."""
    operations = import_optional("PIL.ImageOps", "images", "An image file")
    operations.exif_transpose(image, in_place=True)
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")  # a direct conversion to RGB warns
    return image if image.mode == mode else image.convert(mode)


def _mode(size: ImageSize) -> str:
    return "L" if size.channels == 1 else "RGB"


def _too_large(path: Path | str, found: str, size: ImageSize) -> DataError:
    advice = f", or set data.pixels={MOST_PIXELS}" if size.pixels < MOST_PIXELS else ""
    return DataError(
        f"{path} should have at most {size.pixels:,} pixels and has {found}; a small file can "
        f"claim so many to fill the memory. Remove it, or make it smaller{advice}."
    )
