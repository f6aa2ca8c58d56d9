"""Images with a class each, and their idx files, the format of MNIST."""

import io
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jtrain.data.sources.arrays import Arrays, hold_out
from jtrain.data.sources.files import open_decompressed, read_into
from jtrain.data.sources.source import Source
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
    kinds = image.ndim == 3 and image.dtype == np.uint8 and label.dtype.kind in "iu"
    if not kinds or label.shape != image.shape[:1] or not len(image):
        raise DataError(
            f"{images} should hold images of bytes, n x height x width, and {labels} a label of "
            f"each; they hold {image.dtype} of shape {image.shape}, and {label.dtype} of shape "
            f"{label.shape}. Give two files of one set, the images (idx3-ubyte) first."
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


# By the third byte of the file; all are big-endian. Source: the description of the format at
# http://yann.lecun.com/exdb/mnist/ (archived), "the IDX file format".
TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> np.ndarray:
    """Return the array of an idx file, plain or `.gz`.

    An uncompressed file of 8-bit numbers is memory-mapped, read-only. Any other is read, or
    decompressed, straight into the array, without a second copy.

    Raises:
        DataError: a file that is not an idx file, is cut off, or continues behind its end; it names
            the byte.
    """
    path = Path(path)
    with open_decompressed(path) as stream:
        dtype, shape = _header(path, stream)
        begin, size = 4 + 4 * len(shape), math.prod(shape) * dtype.itemsize
        if path.suffix != ".gz":
            _check_size(path, shape, size, os.path.getsize(path) - begin)
            if dtype.itemsize == 1 and size:
                return np.memmap(path, dtype, "r", begin, shape)
        array = np.empty(shape, dtype)
        found = read_into(stream, array.reshape(-1).view("u1").data) if size else 0
        _check_size(path, shape, size, found + len(stream.read(1)))
    return array.astype(dtype.newbyteorder("="), copy=False)


def _header(path: Path, stream: io.BufferedIOBase) -> tuple[np.dtype, tuple[int, ...]]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not magic[3]:
        raise DataError(
            f"{path} should be an idx file, which begins with 00 00, a type and a number of dims; "
            f"at byte 0 it has {magic.hex(' ') or 'nothing'}. Give the intended file, such as "
            f"train-images-idx3-ubyte; a file packed by gzip is named .gz."
        )
    dims = magic[3]
    shape = stream.read(4 * dims)
    if len(shape) < 4 * dims:
        raise DataError(
            f"{path} should have the sizes of {dims} dims and ends within them, at byte "
            f"{4 + len(shape)}. It was cut off: get it again."
        )
    return np.dtype(TYPES[magic[2]]), struct.unpack(f">{dims}I", shape)


def _check_size(path: Path, shape: tuple[int, ...], size: int, found: int) -> None:
    """Raise DataError unless `found`, the bytes behind the header, are those of the array."""
    begin = 4 + 4 * len(shape)
    if found != size:
        how = f"ends at byte {begin + found}" if found < size else "continues behind it"
        raise DataError(
            f"{path} should hold {_by(shape)} numbers up to byte {begin + size} and {how}. It was "
            f"cut off, or is another file: get it again."
        )
