"""Augmentation of images b h w or b h w c: its config, the rows that it gives, its transforms."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.scan import check_classes
from jtrain.data.batches.shuffle import ATTEMPTS, beta, integers, uniform
from jtrain.data.sources.arrays import Subset
from jtrain.data.sources.source import Source
from jtrain.errors import DataError

# The lanes of the draws. A partner is flipped and cropped by separate draws.
FLIP, DOWN, RIGHT, PARTNER, WHICH, BOX_DOWN, BOX_RIGHT, AREA, SHAPE, TOP, LEFT = range(11)
PARTNER_LANE, SHARE = 16, 32
assert SHARE + 2 * ATTEMPTS < 256


@configclass
class Augment:
    """Random changes of the training images; by default none."""

    flip: float = Field(default=0.0, ge=0, le=1)
    """The chance of a horizontal flip: 0.5, if a mirror image belongs to the same class."""
    crop: int = Field(default=0, ge=0)
    """Black pixels of padding around an image before a random crop of the old size: 4 is usual for
    32 x 32."""
    zoom: float = Field(default=0.0, ge=0, le=1)
    """The smallest share of an image's area in a random resized crop, 3:4 to 4:3 in shape: 0.08 is
    usual for photographs; 0: no such crop."""
    mixup: float = Field(default=0.0, ge=0, le=1)
    """The alpha of mixup: the share of an image is drawn from Beta(alpha, alpha), the rest is
    another image; 0 mixes nothing, 0.2 is usual. The loss takes `chances` in place of `label`."""
    cutmix: float = Field(default=0.0, ge=0, le=1)
    """The alpha of cutmix: a box of another image is pasted over an image; 0 pastes none, 1 is
    usual. The loss takes `chances` in place of `label`."""

    def build(self, batches: Any, *, classes: int) -> Any:
        """Return the batches of `Shuffled`, augmented; unchanged if there is nothing to do."""
        changes = any((self.flip, self.crop, self.zoom, self.mixup, self.cutmix))
        return Augmented(batches, self, classes=classes) if changes else batches


class Augmented:
    """Augmented batches; the draws of a row depend on the seed, the step and the row only.

    Each image is zoomed into, cropped, flipped, and mixed with a partner. A source of files zooms
    as it decodes (`jtrain.data.images.decode`). The partner is drawn from
    the complete set and not from the batch, so no row depends on how a batch is sharded. The
    partner is zoomed into, cropped and flipped too. With both mixup and cutmix, half of the rows
    take each.

    If rows are mixed, a batch has `chances` (float32, b c) beside `label` (of the first image): the
    share of each class, for `jtrain.losses.cross_entropy`. Mixup gives float32, of bytes in
    0 .. 1; all other changes keep the type.

    Args:
        batches: batches with a `source`, as `Shuffled`.
        classes: classes of the labels; needed if rows are mixed.

    Raises:
        DataError: images or labels of another shape or type, a label out of range, a crop wider
            than the image. Every batch is checked, by its shapes and labels.
    """

    def __init__(self, batches: Any, changes: Augment, *, classes: int = 0):
        self.size, self.ragged = batches.size, batches.ragged
        self.rows, self.end, self.source = batches.rows, batches.end, batches.source
        self.changes, self._batches, self._classes = changes, batches, classes

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        places = self._batches.places(step)
        row = places["row"]
        batch = self._read(self._batches.indices(step), step, row, 0) | places
        if not (self.changes.mixup or self.changes.cutmix):
            return batch
        place = integers(self._batches.seed, step, row, PARTNER, self.rows)
        partner = self._read(place, step, row, PARTNER_LANE)
        image, share = self._mix(batch["image"], partner["image"], step, row)
        chances = self._chances(batch["label"], share)
        chances += self._chances(partner["label"], 1 - share)
        return batch | {"image": image, "chances": chances}

    def shard(self, index: int, count: int) -> "Augmented":
        """Return the same batches, with only the rows of process `index` of `count`."""
        sharded = copy.copy(self)
        sharded._batches = self._batches.shard(index, count)
        return sharded

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, of the first row of a step's batch."""
        return self._batches.epoch_of(step)

    def _read(
        self, indices: np.ndarray, step: int, row: np.ndarray, lane: int
    ) -> dict[str, np.ndarray]:
        """Read rows of the source; zoom into, crop and flip each image by its draws."""
        seed, source, changes = self._batches.seed, self.source, self.changes
        if changes.zoom:
            draws = [uniform(seed, step, row, lane + each) for each in (AREA, SHAPE, TOP, LEFT)]
            windows = WindowDraws(changes.zoom, np.stack(draws))
            rows = read_windows(source, indices, windows)
        else:
            rows = source[indices]
        self._check(rows)
        image = rows["image"]
        if changes.crop:
            down, right = (
                integers(seed, step, row, lane + side, 2 * changes.crop + 1)
                for side in (DOWN, RIGHT)
            )
            image = shift(image, down, right, changes.crop)
        if changes.flip:
            image = mirror(image, uniform(seed, step, row, lane + FLIP) < changes.flip)
        return rows | {"image": image}

    def _mix(
        self, image: np.ndarray, partner_image: np.ndarray, step: int, row: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mix images with others; return the mixed images, and the share of the first."""
        seed, changes = self._batches.seed, self.changes
        if not changes.cutmix:
            share = beta(seed, step, row, SHARE, changes.mixup)
            return blend(image, partner_image, share), share
        box, uncovered = self._draw_boxes(image, step, row)
        pasted_image = paste(image, partner_image, box)
        if not changes.mixup:
            return pasted_image, uncovered
        share = beta(seed, step, row, SHARE, changes.mixup)
        use_cutmix = uniform(seed, step, row, WHICH) < 0.5
        mixed = blend(image, partner_image, share)
        mixed[use_cutmix] = to_float(pasted_image[use_cutmix])
        return mixed, np.where(use_cutmix, uncovered, share)

    def _draw_boxes(
        self, image: np.ndarray, step: int, row: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a box for each image (int64, b 4); return it and the share of pixels outside it.

        Source: Yun et al. 2019, https://arxiv.org/abs/1905.04899, equation 2.
        """
        seed, (height, width) = self._batches.seed, image.shape[1:3]
        side = np.sqrt(1 - beta(seed, step, row, SHARE, self.changes.cutmix))
        box = []
        for lane, size in ((BOX_DOWN, height), (BOX_RIGHT, width)):
            middle = integers(seed, step, row, lane, size)
            length = (side * size).astype(np.int64)
            box += [
                np.maximum(middle - length // 2, 0),
                np.minimum(middle + (length + 1) // 2, size),
            ]
        top, bottom, left, right = box
        covered = (bottom - top) * (right - left) / (height * width)
        return np.stack(box, 1), 1 - covered

    def _chances(self, label: np.ndarray, share: np.ndarray) -> np.ndarray:  # float32, b c
        chances = np.zeros((len(label), self._classes), np.float32)
        chances[np.arange(len(label)), label] = share
        return chances

    def _check(self, rows: dict[str, np.ndarray]) -> None:
        """Raise DataError if rows lack images that can be augmented, or labels to mix."""
        check_images(rows)
        image, changes = rows["image"], self.changes
        if changes.crop >= min(image.shape[1:3]):
            raise DataError(
                f"augment.crop={changes.crop} pads with more pixels than images of "
                f"{image.shape[1]} x {image.shape[2]} have. "
                f"Set augment.crop={max(min(image.shape[1:3]) // 8, 1)}."
            )
        if not (changes.mixup or changes.cutmix):
            return
        if "label" not in rows or rows["label"].ndim != 1:
            raise DataError(
                f"Mixing needs a class for each row as `label` (b), and a row has "
                f"{', '.join(sorted(rows))}. Name the classes 'label', or set augment.mixup=0 and "
                f"augment.cutmix=0."
            )
        check_classes(rows["label"], self._classes, "label", 0)


def mirror(image: np.ndarray, chosen: np.ndarray) -> np.ndarray:  # chosen: bool, b
    """Flip images horizontally where chosen."""
    result = image.copy()
    # A channel at a time: 0.04 ms for an image of 224 x 224 x 3, where whole pixels take 0.3 ms.
    channels = np.ndindex(image.shape[3:])
    for channel in channels:
        view = (slice(None), slice(None), *channel)
        for row in np.flatnonzero(chosen).tolist():
            result[row][view] = image[row][view][:, ::-1]
    return result


def shift(image: np.ndarray, down: np.ndarray, right: np.ndarray, pad: int) -> np.ndarray:
    """Pad images with `pad` pixels of 0 and crop the old size at `down`, `right` (int, b, each
    0 .. 2 pad): `pad`, `pad` is the image itself."""
    height, width = image.shape[1:3]
    edge = [(0, 0), (pad, pad), (pad, pad), *[(0, 0)] * (image.ndim - 3)]
    result = np.empty_like(image)
    # A slice a row: 0.13 ms for 128 images of 32 x 32 x 3, where gathering by index takes 2 ms.
    windows = zip(result, np.pad(image, edge), down.tolist(), right.tolist(), strict=True)
    for target, padded, top, left in windows:
        target[...] = padded[top : top + height, left : left + width]
    return result


def blend(image: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Blend `share` (float, b) of the image with the rest of the other, in float32; bytes as 0 ..
    1."""
    first, second = to_float(image), to_float(other)
    share = share.astype(np.float32)[:, None]
    rows = len(image)
    mixed = share * first.reshape(rows, -1) + (1 - share) * second.reshape(rows, -1)
    return mixed.reshape(image.shape)


def to_float(image: np.ndarray) -> np.ndarray:
    """Return the image in float32, bytes as 0 .. 1."""
    if image.dtype == np.uint8:
        return image * np.float32(1 / 255)
    return image.astype(np.float32, copy=False)


def paste(image: np.ndarray, other: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Paste the other's pixels within `box` (int, b 4: top, bottom, left, right) into the image."""
    result = image.copy()
    for target, origin, (top, bottom, left, right) in zip(result, other, box.tolist(), strict=True):
        target[top:bottom, left:right] = origin[top:bottom, left:right]
    return result


def check_images(rows: Mapping[str, np.ndarray]) -> None:
    """Raise DataError unless `image` is images of bytes or floats, b h w or b h w c."""
    if "image" not in rows:
        raise DataError(
            f"Augmentation was configured, and a row has {', '.join(sorted(rows))}. Name the "
            f"images `image`."
        )
    image = rows["image"]
    if image.ndim not in (3, 4):
        raise DataError(
            f"Augmentation takes images b h w or b h w c; `image` has the "
            f"shape {image.shape}, a batch of {len(image)} first. Reshape its rows to height, "
            f"width and channels before, or set augment.flip=0, augment.crop=0, augment.zoom=0, "
            f"augment.mixup=0 and augment.cutmix=0."
        )
    if image.dtype != np.uint8 and image.dtype.kind != "f":
        raise DataError(
            f"Augmentation takes bytes or floats; `image` holds {image.dtype}. "
            f"Convert it: image.astype('float32')."
        )


SHAPES = 4 / 3  # the largest shape of a window, wide or high


class WindowDraws(NamedTuple):
    """Draws of a random window for each row, made before the size of an image is known."""

    smallest: float
    """The smallest share of an image's area."""
    draws: np.ndarray
    """Numbers in 0 .. 1, float64, 4 b: for the area, the shape, and the place down and right."""

    def row(self, row: int) -> "WindowDraws":
        """Return the draws of one row."""
        return WindowDraws(self.smallest, self.draws[:, row : row + 1])

    def windows(self, height: int, width: int, aspect: float) -> np.ndarray:
        """Return a window (float64, b 4: top, left, height, width, in pixels) of each image.

        The window's share of the area is uniform in `smallest` .. 1. The logarithm of its shape,
        width over height divided by `aspect`, is uniform in 3/4 .. 4/3. A window is cut to the
        image, and then to the largest shape.

        Source: Szegedy et al. 2015, https://arxiv.org/abs/1409.4842, section 6.
        """
        area, shape, top, left = self.draws
        pixels = (self.smallest + (1 - self.smallest) * area) * height * width
        ratio = aspect * np.exp((2 * shape - 1) * np.log(SHAPES))
        high = np.minimum(np.sqrt(pixels / ratio), height)
        wide = np.minimum(np.sqrt(pixels * ratio), width)
        high = np.minimum(high, wide * (SHAPES / aspect))
        wide = np.minimum(wide, high * (SHAPES * aspect))
        return np.stack([top * (height - high), left * (width - wide), high, wide], 1)


def read_windows(source: Source, indices: np.ndarray, draws: WindowDraws) -> dict[str, np.ndarray]:
    """Return the rows at `indices` (int64, b), of each image a window, resized to one size.

    A source of files cuts the window from the file's pixels; the images of any other are resized
    to themselves.

    Raises:
        DataError: if `image` is not images; see `check_images`.
    """
    while isinstance(source, Subset):
        source, indices = source.source, source.indices[indices]
    if read := getattr(source, "read_windows", None):
        return read(indices, draws)
    rows = source[indices]
    check_images(rows)
    height, width = rows["image"].shape[1:3]
    return rows | {"image": zoom(rows["image"], draws.windows(height, width, width / height))}


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
