"""Windows of images b h w or b h w c brought to the size of the whole image."""

import numpy as np

SHAPES = 4 / 3  # a window is at most so much wider than high, or higher than wide


def windows(
    size: tuple[int, ...],
    smallest: float,
    area: np.ndarray,
    shape: np.ndarray,
    top: np.ndarray,
    left: np.ndarray,
) -> np.ndarray:  # float64, b 4: top, left, height and width in pixels
    """Return a window for each image, of draws in 0 .. 1 (each b).

    Its share of the area is uniform in `smallest` .. 1, the logarithm of its shape uniform; what
    would stick out is cut to the image.

    Source: Szegedy et al. 2015, https://arxiv.org/abs/1409.4842, section 6.
    """
    height, width = size
    share = smallest + (1 - smallest) * area
    ratio = np.exp((2 * shape - 1) * np.log(SHAPES))  # of width to height, over that of the image
    high = np.minimum(height * np.sqrt(share / ratio), height)
    wide = np.minimum(width * np.sqrt(share * ratio), width)
    return np.stack([top * (height - high), left * (width - wide), high, wide], 1)


def zoomed(image: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Return each image's window (float, b 4) at the size of the image, bilinear; keeps the type.

    The window that is the whole image gives the image itself.
    """
    result = np.empty_like(image)
    for out, one, (top, left, high, wide) in zip(result, image, window.tolist(), strict=True):
        part = _along(one.astype(np.float32), top, high, 0)
        part = _along(part, left, wide, 1)
        out[...] = np.rint(part) if image.dtype == np.uint8 else part
    return result


def _along(image: np.ndarray, begin: float, length: float, axis: int) -> np.ndarray:
    """`length` pixels from `begin` on along an axis, as many as there were."""
    count = image.shape[axis]
    # A pixel's middle is at +0.5: what lies beyond the outermost middles is as they are.
    places = begin + (np.arange(count) + 0.5) * (length / count) - 0.5
    places = np.clip(places, 0, count - 1)
    low = np.minimum(places.astype(np.int64), max(count - 2, 0))
    share = (places - low).astype(np.float32)
    share = share.reshape([-1 if dim == axis else 1 for dim in range(image.ndim)])
    first, second = image.take(low, axis), image.take(np.minimum(low + 1, count - 1), axis)
    return first + share * (second - first)
