"""PNG encoding of images, by the standard library alone."""

import math
import struct
import zlib
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jtrain.errors import DataError

_COLOURS = {1: 0, 3: 2, 4: 6}  # by channels: grey, RGB, RGBA


def encode_png(image: Any) -> bytes:
    """Encode an image h w c (or h w) of bytes as PNG; c is 1 (grey), 3 (RGB) or 4 (RGBA).

    Raises:
        DataError: if the array is no such image.

    Source: the PNG specification, third edition, https://www.w3.org/TR/png-3/.
    """
    pixels = np.asarray(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[-1] not in _COLOURS or not pixels.size:
        raise DataError(
            f"an image is an array h w c with 1, 3 or 4 channels, and this one is "
            f"{list(pixels.shape)}; give grey images as [..., None]"
        )
    height, width, channels = pixels.shape
    rows = _to_bytes(pixels).reshape(height, width * channels)
    scanlines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    data = zlib.compress(scanlines.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, body) for kind, body in [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    )


def tile_images(images: Any, columns: int = 0) -> UInt8[np.ndarray, "h w c"]:
    """Tile images b h w c into one picture, row by row, with a dark line between them.

    Args:
        images: bytes; other types are rounded into 0 .. 255.
        columns: number of columns; 0 for about as many as rows.

    Raises:
        DataError: if the array is not b h w c.
    """
    images = np.asarray(images)
    if images.ndim != 4 or not images.size:
        raise DataError(
            f"images are an array b h w c, and this one is {list(images.shape)}; give one "
            f"image as [None], grey ones as [..., None]"
        )
    count, height, width, channels = images.shape
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    rows = -(-count // columns)
    picture = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), 64, np.uint8)
    for i, image in enumerate(_to_bytes(images)):
        y, x = (i // columns) * (height + 1), (i % columns) * (width + 1)
        picture[y : y + height, x : x + width] = image
    return picture


def _to_bytes(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.uint8:
        return x
    return np.clip(np.nan_to_num(np.rint(x.astype(np.float64))), 0, 255).astype(np.uint8)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
