"""Pictures: images of a batch as bytes, and a picture as characters of a terminal."""

import math

import numpy as np

SHADES = " .:-=+*#%@"  # from black to white on a dark screen


def to_bytes(images: np.ndarray) -> np.ndarray:  # b h w [c], or b n
    """Convert images to b h w c, uint8, with 1 or 3 channels.

    Bytes are unchanged; other numbers are scaled to the range of all images.
    A vector becomes a square picture if its size is a square, else a line. With 2 or more than 4
    channels the first is shown, with 4 the first three.
    """
    if images.ndim == 2:
        side = math.isqrt(images.shape[1])
        shape = (side, side) if side * side == images.shape[1] else (1, images.shape[1])
        images = images.reshape(len(images), *shape)
    images = images[..., None] if images.ndim == 3 else images
    images = images[..., :3] if images.shape[-1] in (3, 4) else images[..., :1]
    if images.dtype == np.uint8:
        return images
    values = images.astype(np.float64)
    low, high = np.nanmin(values), np.nanmax(values)
    return np.nan_to_num((values - low) / ((high - low) or 1) * 255).round().astype(np.uint8)


def render_blocks(picture: np.ndarray) -> str:  # h w c, uint8, c 1 or 3
    """Render the picture for a terminal with 24-bit colours: a character is two pixels high."""
    picture = np.broadcast_to(picture, (*picture.shape[:2], 3))
    picture = np.pad(picture, ((0, len(picture) % 2), (0, 0), (0, 0)))
    lines = []
    for upper, lower in zip(picture[::2].tolist(), picture[1::2].tolist(), strict=True):
        pairs = zip(upper, lower, strict=True)
        cells = (f"\x1b[38;2;{_colour(a)};48;2;{_colour(b)}m\u2580" for a, b in pairs)
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def render_shades(picture: np.ndarray) -> str:  # h w c, uint8, c 1 or 3
    """Render the picture as plain text: a pixel is two characters wide."""
    grey = picture.astype(int).mean(-1)
    shades = [[2 * SHADES[int(pixel) * len(SHADES) // 256] for pixel in line] for line in grey]
    return "\n".join("".join(line).rstrip() for line in shades)


def _colour(pixel: list[int]) -> str:
    return ";".join(map(str, pixel))
