"""Random resized crops of images b h w or b h w c."""

import numpy as np

SHAPES = 4 / 3  # the largest aspect ratio of a window, wide or high


def draw_windows(
    size: tuple[int, ...],
    smallest: float,
    area: np.ndarray,
    shape: np.ndarray,
    top: np.ndarray,
    left: np.ndarray,
) -> np.ndarray:  # float64, b 4: top, left, height and width in pixels
    """Return a window for each image from draws in 0 .. 1 (each b).

    The window's share of the area is uniform in `smallest` .. 1, and the logarithm of its shape is
    uniform; a window is cut to the image.

    Source: Szegedy et al. 2015, https://arxiv.org/abs/1409.4842, section 6.
    """
    height, width = size
    share = smallest + (1 - smallest) * area
    ratio = np.exp((2 * shape - 1) * np.log(SHAPES))  # of width to height, over that of the image
    high = np.minimum(height * np.sqrt(share / ratio), height)
    wide = np.minimum(width * np.sqrt(share * ratio), width)
    return np.stack([top * (height - high), left * (width - wide), high, wide], 1)


def zoom(image: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Resize each image's window (float, b 4) to the image, bilinearly; keep the type.

    A window of the full image gives the image itself.
    """
    result = np.empty_like(image)
    for out, one, (top, left, high, wide) in zip(result, image, window.tolist(), strict=True):
        part = _resize_axis(one.astype(np.float32), top, high, 0)
        part = _resize_axis(part, left, wide, 1)
        out[...] = np.rint(part) if image.dtype == np.uint8 else part
    return result


def _resize_axis(image: np.ndarray, begin: float, length: float, axis: int) -> np.ndarray:
    """Resample `length` pixels from `begin` on along an axis to the size of the axis."""
    count = image.shape[axis]
    # A pixel's centre is at +0.5: places beyond the outermost centres take their values.
    places = begin + (np.arange(count) + 0.5) * (length / count) - 0.5
    places = np.clip(places, 0, count - 1)
    low = np.minimum(places.astype(np.int64), max(count - 2, 0))
    share = (places - low).astype(np.float32)
    share = share.reshape([-1 if dim == axis else 1 for dim in range(image.ndim)])
    first, second = image.take(low, axis), image.take(np.minimum(low + 1, count - 1), axis)
    return first + share * (second - first)
