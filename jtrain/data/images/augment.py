"""Augmentation of images: its config, and the rows that it gives."""

import copy
from typing import Any

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.batches.scan import check_classes
from jtrain.data.batches.shuffle import ATTEMPTS, beta, integers, uniform
from jtrain.data.images.transforms import (
    WindowDraws,
    blend,
    check_images,
    mirror,
    paste,
    read_windows,
    shift,
    to_float,
)
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
    as it decodes (`jtrain.data.images.transforms`). The partner is drawn from
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
        self.rows, self.end = batches.rows, batches.end
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

    def fingerprint(self) -> str:
        """Return the fingerprint of the data before augmentation."""
        return fingerprint(self._batches)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, of the first row of a step's batch."""
        return self._batches.epoch_of(step)

    def _read(
        self, indices: np.ndarray, step: int, row: np.ndarray, lane: int
    ) -> dict[str, np.ndarray]:
        """Read rows of the source; zoom into, crop and flip each image by its draws."""
        seed, source, changes = self._batches.seed, self._batches.source, self.changes
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
        if np.ndim(rows.get("label")) != 1:
            raise DataError(
                f"Mixing needs a class for each row as `label` (b), and a row has "
                f"{', '.join(sorted(rows))}. Name the classes 'label', or set augment.mixup=0 and "
                f"augment.cutmix=0."
            )
        check_classes(rows["label"], self._classes, "label", 0)
