"""Batches whose images are changed at random, as a function of (seed, step, row)."""

import copy
from typing import Any, NamedTuple

import numpy as np

from jtrain.data.batches.counter_rng import ATTEMPTS, beta, uniform, whole
from jtrain.data.batches.fingerprint import fingerprint
from jtrain.data.images.transforms import (
    as_floats,
    blended,
    mirrored,
    pasted,
    refuse_no_images,
    shifted,
)
from jtrain.data.images.zoom import windows, zoomed
from jtrain.errors import DataError

# The lanes of the draws. A partner is flipped and cropped by draws of its own.
FLIP, DOWN, RIGHT, PARTNER, WHICH, BOX_DOWN, BOX_RIGHT, AREA, SHAPE, TOP, LEFT = range(11)
OF_PARTNER, SHARE = 16, 32
assert SHARE + 2 * ATTEMPTS < 256


class Augmentation(NamedTuple):
    """What is done to the images; nothing where all are 0."""

    flip: float = 0.0
    """The chance that left and right are exchanged."""
    crop: int = 0
    """Pixels of 0 that are laid around before a window of the old size is cut at random."""
    mixup: float = 0.0
    """The alpha of Beta(alpha, alpha), the share that an image keeps; in 0 .. 1."""
    cutmix: float = 0.0
    """The alpha of the share of an image that no box of another covers; in 0 .. 1."""
    zoom: float = 0.0
    """The smallest share of an image that a window at random has, which becomes the image."""


class Augmented:
    """The batches of `batches`, changed: the row of a step draws the same whatever reads it.

    Each image is zoomed into, cropped, flipped, and mixed with a partner, which is drawn from the
    whole set and not from the batch: so nothing depends on how a batch is shared out. The partner
    is zoomed into, cropped and flipped too. With both mixup and cutmix, a row takes one or the
    other, evenly.

    Where rows are mixed, a batch has `chances` (float32, b c) beside `label` (its own image's):
    the share of each class, for `jtrain.losses.soft_cross_entropy`. Mixup gives float32, of bytes
    in 0 .. 1; all else keeps the type.

    Args:
        batches: with `source`, `rows`, `seed` and `end`, as `Shuffled`.
        classes: of the labels; needed where rows are mixed.

    Raises:
        DataError: images or labels of another shape or type, a label out of range, a crop wider
            than the image. Looked for in every batch, by shapes alone and by the labels.
    """

    def __init__(
        self,
        batches: Any,
        changes: Augmentation,
        *,
        classes: int = 0,
        image: str = "image",
        label: str = "label",
    ):
        self.size, self.ragged = batches.size, batches.ragged
        self.rows, self.end = batches.rows, batches.end
        self.changes, self._batches, self._classes = changes, batches, classes
        self._image, self._label = image, label

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        batch = self._batches[step]
        self._refuse(batch)
        row = batch["row"]
        image = self._alone(batch[self._image], step, row, 0)
        if not (self.changes.mixup or self.changes.cutmix):
            return batch | {self._image: image}
        place = whole(self._batches.seed, step, row, PARTNER, self.rows)
        partner = self._batches.source[place]
        self._refuse_labels(partner)
        other = self._alone(partner[self._image], step, row, OF_PARTNER)
        image, share = self._mixed(image, other, step, row)
        chances = self._chances(batch[self._label], share) + self._chances(
            partner[self._label], 1 - share
        )
        return batch | {self._image: image, "chances": chances}

    def shard(self, index: int, count: int) -> "Augmented":
        """The same batches, of which only the rows of process `index` of `count` are read."""
        mine = copy.copy(self)
        mine._batches = self._batches.shard(index, count)
        return mine

    def fingerprint(self) -> str:
        """What the data is before it is changed, in a line."""
        return fingerprint(self._batches)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, of the first row of a step's batch."""
        return self._batches.epoch_of(step)

    def _alone(self, image: np.ndarray, step: int, row: np.ndarray, lane: int) -> np.ndarray:
        """Images zoomed into, cropped and flipped, each by its draws."""
        seed, changes = self._batches.seed, self.changes
        if changes.zoom:
            draws = [uniform(seed, step, row, lane + each) for each in (AREA, SHAPE, TOP, LEFT)]
            image = zoomed(image, windows(image.shape[1:3], changes.zoom, *draws))
        if changes.crop:
            down, right = (
                whole(seed, step, row, lane + side, 2 * changes.crop + 1) for side in (DOWN, RIGHT)
            )
            image = shifted(image, down, right, changes.crop)
        if changes.flip:
            image = mirrored(image, uniform(seed, step, row, lane + FLIP) < changes.flip)
        return image

    def _mixed(
        self, image: np.ndarray, other: np.ndarray, step: int, row: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Images with a part of the others in them, and the share that is their own."""
        seed, changes = self._batches.seed, self.changes
        if not changes.cutmix:
            share = beta(seed, step, row, SHARE, changes.mixup)
            return blended(image, other, share), share
        box, kept = self._boxes(image, step, row)
        cut = pasted(image, other, box)
        if not changes.mixup:
            return cut, kept
        share = beta(seed, step, row, SHARE, changes.mixup)
        cuts = uniform(seed, step, row, WHICH) < 0.5
        mixed = blended(image, other, share)
        mixed[cuts] = as_floats(cut[cuts])
        return mixed, np.where(cuts, kept, share)

    def _boxes(
        self, image: np.ndarray, step: int, row: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A box for each image (int64, b 4), and the share of its pixels without.

        Source: Yun et al. 2019, https://arxiv.org/abs/1905.04899, equation 2.
        """
        seed, (height, width) = self._batches.seed, image.shape[1:3]
        side = np.sqrt(1 - beta(seed, step, row, SHARE, self.changes.cutmix))
        box = []
        for lane, size in ((BOX_DOWN, height), (BOX_RIGHT, width)):
            middle = whole(seed, step, row, lane, size)
            long = (side * size).astype(np.int64)
            box += [np.maximum(middle - long // 2, 0), np.minimum(middle + (long + 1) // 2, size)]
        top, bottom, left, right = box
        covered = (bottom - top) * (right - left) / (height * width)
        return np.stack(box, 1), 1 - covered

    def _chances(self, label: np.ndarray, share: np.ndarray) -> np.ndarray:  # float32, b c
        chances = np.zeros((len(label), self._classes), np.float32)
        chances[np.arange(len(label)), label] = share
        return chances

    def _refuse(self, batch: dict[str, np.ndarray]) -> None:
        """Raises if a batch is not what the changes take."""
        if self._image not in batch:
            raise DataError(
                f"Augmentation was asked of `{self._image}`, and a batch has "
                f"{', '.join(sorted(batch))}. Name the images: image={sorted(batch)[0]!r}."
            )
        image, changes = batch[self._image], self.changes
        refuse_no_images(self._image, image)
        if changes.crop >= min(image.shape[1:3]):
            raise DataError(
                f"augment.crop={changes.crop} lays more pixels around than images of "
                f"{image.shape[1]} x {image.shape[2]} have. "
                f"Set augment.crop={max(min(image.shape[1:3]) // 8, 1)}."
            )
        if changes.mixup or changes.cutmix:
            self._refuse_labels(batch)

    def _refuse_labels(self, batch: dict[str, np.ndarray]) -> None:
        """Raises if labels are no classes."""
        if self._label not in batch:
            raise DataError(
                f"Mixing was asked for, which takes a class for each row as `{self._label}`, and "
                f"a batch has {', '.join(sorted(batch))}. Name it {self._label!r}, or set "
                f"augment.mixup=0 and augment.cutmix=0."
            )
        label = batch[self._label]
        if label.ndim != 1 or label.dtype.kind not in "iu":
            raise DataError(
                f"Mixing was asked for, which takes a class for each row; `{self._label}` holds "
                f"{label.dtype} of shape {label.shape}. Give whole numbers (b), or set "
                f"augment.mixup=0 and augment.cutmix=0."
            )
        wrong = (label < 0) | (label >= self._classes)
        if wrong.any():
            raise DataError(
                f"Mixing was asked for with classes 0 .. {self._classes - 1}, and a row has class "
                f"{label[wrong][0]}. Set classes={max(int(label.max()) + 1, 1)}, or mend the row."
            )
