"""Images of a batch as bytes that can be shown, and a picture as characters of a terminal."""

import math

import numpy as np

SHADES = " .:-=+*#%@"  # from black to white, as on a dark screen


def as_bytes(images: np.ndarray) -> np.ndarray:  # b h w [c], or b n
    """The images b h w c, uint8, with 1 or 3 channels.

    Bytes stay as they are; other numbers are spread from the least to the greatest of all images.
    A vector is a square picture if it can be, or else a line. Of 2 or more than 4 channels the
    first is shown, of 4 the first three.
    """
    if images.ndim == 2:
        side = math.isqrt(images.shape[1])
        shape = (side, side) if side * side == images.shape[1] else (1, images.shape[1])
        images = images.reshape(len(images), *shape)
    images = images[..., None] if images.ndim == 3 else images
    images = images[..., :3] if images.shape[-1] in (3, 4) else images[..., :1]
    if images.dtype == np.uint8:
        return images
    shown = images.astype(np.float64)
    low, high = np.nanmin(shown), np.nanmax(shown)
    return np.nan_to_num((shown - low) / ((high - low) or 1) * 255).round().astype(np.uint8)


def in_blocks(picture: np.ndarray) -> str:  # h w c, uint8, c 1 or 3
    """The picture for a terminal with 24-bit colours: two points, one above the other, a letter."""
    picture = np.broadcast_to(picture, (*picture.shape[:2], 3))
    picture = np.pad(picture, ((0, len(picture) % 2), (0, 0), (0, 0)))
    lines = []
    for upper, lower in zip(picture[::2].tolist(), picture[1::2].tolist(), strict=True):
        points = zip(upper, lower, strict=True)
        letters = (f"\x1b[38;2;{_colour(a)};48;2;{_colour(b)}m\u2580" for a, b in points)
        lines.append("".join(letters) + "\x1b[0m")
    return "\n".join(lines)


def in_shades(picture: np.ndarray) -> str:  # h w c, uint8, c 1 or 3
    """The picture for a file: a point is two characters beside each other."""
    grey = picture.astype(int).mean(-1)
    text = lambda line: "".join(2 * SHADES[int(point) * len(SHADES) // 256] for point in line)
    return "\n".join(text(line).rstrip() for line in grey)


def _colour(point: list[int]) -> str:
    return ";".join(map(str, point))
