"""Pictures as PNG files, by the standard library alone."""

import math
import struct
import zlib
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jtrain.errors import DataError

_COLOURS = {1: 0, 3: 2, 4: 6}  # of the channels: grey, RGB, RGBA


def encode_png(image: Any) -> bytes:
    """The file of an image h w c (or h w) of bytes; c is 1 (grey), 3 (RGB) or 4 (RGBA).

    Raises:
        DataError: if it is no such image.

    Source: the PNG specification, third edition, https://www.w3.org/TR/png-3/.
    """
    pixels = np.asarray(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[-1] not in _COLOURS or not pixels.size:
        raise DataError(
            f"a picture is an array h w c with 1, 3 or 4 channels, and this one is "
            f"{list(pixels.shape)}; give grey pictures as [..., None]"
        )
    high, wide, channels = pixels.shape
    rows = _bytes(pixels).reshape(high, wide * channels)
    unfiltered = np.concatenate([np.zeros((high, 1), np.uint8), rows], axis=1)
    head = struct.pack(">IIBBBBB", wide, high, 8, _COLOURS[channels], 0, 0, 0)
    data = zlib.compress(unfiltered.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, body) for kind, body in [(b"IHDR", head), (b"IDAT", data), (b"IEND", b"")]
    )


def grid(images: Any, columns: int = 0) -> UInt8[np.ndarray, "h w c"]:
    """Images b h w c as one picture, row by row, a dark line between them.

    Args:
        images: bytes; what is no byte is rounded into 0 .. 255.
        columns: in the picture; 0 for about as many as rows.

    Raises:
        DataError: if they are no images b h w c.
    """
    images = np.asarray(images)
    if images.ndim != 4 or not images.size:
        raise DataError(
            f"pictures are an array b h w c, and this one is {list(images.shape)}; give one "
            f"picture as [None], grey ones as [..., None]"
        )
    count, high, wide, channels = images.shape
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    rows = -(-count // columns)
    picture = np.full((rows * (high + 1) - 1, columns * (wide + 1) - 1, channels), 64, np.uint8)
    for i, image in enumerate(_bytes(images)):
        y, x = (i // columns) * (high + 1), (i % columns) * (wide + 1)
        picture[y : y + high, x : x + wide] = image
    return picture


def _bytes(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.uint8:
        return x
    return np.clip(np.nan_to_num(np.rint(x.astype(np.float64))), 0, 255).astype(np.uint8)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
