"""Images with a class each: the result of image configs."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.idx import read_idx
from jtrain.data.sources.source import Source
from jtrain.data.sources.subset import hold_out
from jtrain.errors import DataError

FILES = (  # the names of MNIST's files
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class ImageDataset(NamedTuple):
    """Training and evaluation rows: `image` (b h w c) and `label` (int32, b)."""

    train: Source
    validation: Source
    """Rows to validate on during training; the test set if no rows were held out."""
    test: Source
    """Rows on which published numbers are measured."""
    image: tuple[int, int, int]
    """Height, width and channels."""
    classes: int


def read_labelled(images: Path, labels: Path, *, classes: int) -> Arrays:
    """Read `image` (uint8, b h w 1) and `label` (int32, b) from two idx files.

    Raises:
        DataError: files that are damaged, of other shapes, of different lengths or without a row,
            or a label that is not in 0 .. classes-1.
    """
    image, label = read_idx(images), read_idx(labels)
    if image.ndim != 3 or image.dtype != np.uint8:
        raise DataError(
            f"{images} should hold images of bytes, n x height x width, and holds {image.dtype} "
            f"of shape {image.shape}. Give the file of images (idx3-ubyte) first, of labels second."
        )
    if label.ndim != 1 or label.dtype.kind not in "iu":
        raise DataError(
            f"{labels} should hold a label for each image and holds {label.dtype} of shape "
            f"{label.shape}. Give the file of labels (idx1-ubyte) second."
        )
    if len(image) != len(label) or not len(image):
        raise DataError(
            f"{images} has {len(image)} images and {labels} {len(label)} labels; each image needs "
            f"one. Give the two files of one set, with at least a row."
        )
    wrong = np.flatnonzero((label < 0) | (label >= classes))
    if len(wrong):
        row, value = int(wrong[0]), int(label[wrong[0]])
        item = label.dtype.itemsize
        raise DataError(
            f"{labels} should hold classes 0 .. {classes - 1}; label {row}, at byte "
            f"{8 + row * item}, is {value}. Set classes={int(label.max()) + 1}, or fix the file."
        )
    return Arrays(image=image[..., None], label=label.astype(np.int32))


def read_dataset(paths: Sequence[Path], *, classes: int, validation: float) -> ImageDataset:
    """Read a set from the four files of `FILES`; hold out a share of its training rows.

    Raises:
        DataError: see `read_labelled`; images of two sizes; a share of no or all rows.
    """
    all_rows = read_labelled(*paths[:2], classes=classes)
    test = read_labelled(*paths[2:], classes=classes)
    sizes = [rows.arrays["image"].shape[1:] for rows in (all_rows, test)]
    if sizes[0] != sizes[1]:
        raise DataError(
            f"{paths[0]} has images of {_by(sizes[0])} and {paths[2]} of {_by(sizes[1])}. "
            f"Give the files of one set."
        )
    height, width, channels = sizes[0]
    train, held_out = hold_out(all_rows, validation) if validation else (all_rows, test)
    return ImageDataset(train, held_out, test, (height, width, channels), classes)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
