"""What is done to images b h w or b h w c, one by one: nothing is drawn here."""

import numpy as np

from jtrain.errors import DataError


def mirrored(image: np.ndarray, chosen: np.ndarray) -> np.ndarray:  # chosen: bool, b
    """Left and right exchanged where chosen."""
    return np.where(_over(chosen, image), image[:, :, ::-1], image)


def shifted(image: np.ndarray, down: np.ndarray, right: np.ndarray, pad: int) -> np.ndarray:
    """The window of the image's size at `down`, `right` (int, b, each 0 .. 2 pad) of the image with
    `pad` pixels of 0 on every side: `pad`, `pad` is the image itself."""
    height, width = image.shape[1:3]
    edge = [(0, 0), (pad, pad), (pad, pad), *[(0, 0)] * (image.ndim - 3)]
    padded = np.pad(image, edge)
    rows = down[:, None] + np.arange(height)
    columns = right[:, None] + np.arange(width)
    return padded[np.arange(len(image))[:, None, None], rows[:, :, None], columns[:, None, :]]


def blended(image: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    """`share` (float, b) of the image and the rest of the other, in float32; bytes as 0 .. 1."""
    scale = np.float32(1 / 255 if image.dtype == np.uint8 else 1)
    first, second = (a.astype(np.float32) * scale for a in (image, other))
    share = _over(share.astype(np.float32), image)
    return share * first + (1 - share) * second


def pasted(image: np.ndarray, other: np.ndarray, box: np.ndarray) -> np.ndarray:
    """The other's pixels within `box` (int, b 4: top, bottom, left, right), the image's without."""
    top, bottom, left, right = (side[:, None] for side in box.T)
    rows, columns = (np.arange(size) for size in image.shape[1:3])
    inside = ((rows >= top) & (rows < bottom))[:, :, None]
    inside = inside & ((columns >= left) & (columns < right))[:, None, :]
    return np.where(inside.reshape(*inside.shape, *[1] * (image.ndim - 3)), other, image)


def refuse_no_images(name: str, image: np.ndarray) -> None:
    """Raises DataError if an array is no images of bytes or floats, b h w or b h w c."""
    if image.ndim not in (3, 4):
        raise DataError(
            f"Augmentation was asked for, which takes images b h w or b h w c; `{name}` has the "
            f"shape {image.shape}, a batch of {len(image)} first. Reshape its rows to height, "
            f"width and channels before, or set augment.flip=0, augment.crop=0, augment.mixup=0 "
            f"and augment.cutmix=0."
        )
    if image.dtype != np.uint8 and image.dtype.kind != "f":
        raise DataError(
            f"Augmentation was asked for, which takes bytes or floats; `{name}` holds "
            f"{image.dtype}. Convert it: {name}.astype('float32')."
        )


def _over(values: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Values of rows, as an array that is spread over the images."""
    return values.reshape(-1, *[1] * (image.ndim - 1))
