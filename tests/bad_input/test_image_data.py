"""Mistakes in images and records: what each is told, and that doing what it says works.

A row is what was done, the three parts of the answer (what was asked, what was found, what to
type), and what was typed then.
"""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import pytest
from image_files import (
    alone_here,
    idx_bytes,
    write_digits,
    write_fashion_mnist,
    write_idx,
    write_records,
)

from jtrain.data import (
    Arrays,
    GrainRows,
    Shuffled,
    Subset,
    TFRecords,
    hold_out,
    read_example,
    read_idx,
    read_labelled,
)
from jtrain.data.batches.file_sharding import shard_files
from jtrain.data.images.augment import Augment
from jtrain.data.images.digits import Digits
from jtrain.data.images.idx_images import FashionMnist, IdxImages
from jtrain.errors import DataError

FLAT = np.zeros((8, 16), np.float32)
SQUARE = FLAT.reshape(8, 4, 4)
TEN = np.arange(8) + 3


class Case(NamedTuple):
    name: str
    wrong: Callable[[Path], Any]
    says: tuple[str, ...]
    right: Callable[[Path], Any]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def augmented(augment: Augment, classes: int = 10, **arrays: np.ndarray) -> Any:
    return augment.build(Shuffled(Arrays(**arrays), size=8), classes=classes)[0]


def labelled(folder: Path, classes: int) -> Any:
    images = write_idx(folder / "images", np.zeros((3, 4, 4), np.uint8))
    labels = write_idx(folder / "labels", np.array([0, 9, 10], np.uint8))
    return read_labelled(images, labels, classes=classes)


CASES = [
    Case(
        "a set that is missing",
        lambda _: FashionMnist().build(),
        (
            "fashion-mnist was requested",
            "The search covered",
            "apt-get install dataset-fashion-mnist",
        ),
        lambda folder: [write_fashion_mnist(folder / "fashion-mnist"), FashionMnist().build()],
    ),
    Case(
        "digits that are missing",
        lambda folder: [write_digits(folder / "digit"), Digits().build()],
        ("digits was requested", "digits.csv", "pip install scikit-learn"),
        lambda folder: [write_digits(folder / "digits"), Digits().build()],
    ),
    Case(
        "a label out of range",
        lambda folder: labelled(folder, 10),
        ("0 .. 9", "label 2, at byte 10, is 10", "Set classes=11"),
        lambda folder: labelled(folder, 11),
    ),
    Case(
        "a packed file without .gz",
        lambda folder: read_idx(write(folder / "images", gzip.compress(idx_bytes(FLAT)))),
        ("begins with 00 00", "at byte 0 it has 1f 8b", "is named .gz"),
        lambda folder: read_idx(write(folder / "images.gz", gzip.compress(idx_bytes(FLAT)))),
    ),
    Case(
        "a folder without a file",
        lambda folder: IdxImages(folder=str(folder), classes=10).build(),
        ("lacks train-images-idx3-ubyte", "holds nothing", "set data.folder="),
        lambda folder: IdxImages(folder=str(write_fashion_mnist(folder)), classes=10).build(),
    ),
    Case(
        "a share that keeps nothing",
        lambda _: hold_out(Arrays(x=TEN), 0.01),
        ("validation=0.01 of 8 rows", "none of them", "Set validation=0.5"),
        lambda _: hold_out(Arrays(x=TEN), 0.5),
    ),
    Case(
        "a row of a subset that is not there",
        lambda _: Subset(Arrays(x=TEN), np.arange(9)),
        ("row 8 of 8", "counted from 0", "indices[indices < 8]"),
        lambda _: Subset(Arrays(x=TEN), (indices := np.arange(9))[indices < 8]),
    ),
    Case(
        "a subset by a mask",
        lambda _: Subset(Arrays(x=TEN), TEN > 2),
        ("whole numbers", "bool of shape (8,)", "np.flatnonzero(mask)"),
        lambda _: Subset(Arrays(x=TEN), np.flatnonzero(TEN > 2)),
    ),
    Case(
        "augmentation of rows that are no images",
        lambda _: augmented(Augment(flip=0.5), image=FLAT),
        ("takes images b h w", "shape (8, 16)", "Reshape its rows"),
        lambda _: augmented(Augment(flip=0.5), image=FLAT.reshape(8, 4, 4)),
    ),
    Case(
        "a crop wider than the image",
        lambda _: augmented(Augment(crop=4), image=SQUARE),
        ("augment.crop=4", "4 x 4", "Set augment.crop=1"),
        lambda _: augmented(Augment(crop=1), image=SQUARE),
    ),
    Case(
        "mixing without classes",
        lambda _: augmented(Augment(mixup=0.2), image=SQUARE),
        ("a class for each row", "a row has image", "augment.mixup=0"),
        lambda _: augmented(Augment(mixup=0), image=SQUARE),
    ),
    Case(
        "mixing with too few classes",
        lambda _: augmented(Augment(cutmix=1.0), image=SQUARE, label=TEN),
        ("0 .. 9", "a row has class 10", "Set classes=11"),
        lambda _: augmented(Augment(cutmix=1.0), classes=11, image=SQUARE, label=TEN),
    ),
    Case(
        "records that are no examples",
        lambda folder: read_example(TFRecords(write_records(folder / "a", [b"\x89PNG"]))[0]),
        ("tf.train.Example", "89 50 4e 47", "{'x': np.frombuffer(record, 'uint8')}"),
        lambda folder: GrainRows(
            grain.MapDataset.source(TFRecords(write_records(folder / "a", [b"\x89PNG"]))).map(
                lambda record: {"x": np.frombuffer(record, "uint8")}
            )
        )[np.array([0])],
    ),
    Case(
        "fewer files than processes",
        lambda folder: shard_files([folder], index=0, count=2, policy="file"),
        ("sharing=file", "1 file, 2 processes", "Set sharing=data"),
        lambda folder: shard_files([folder], index=0, count=2, policy="data"),
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, the only one in which sets are searched."""
    alone_here(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_says_what_is_wrong_and_what_to_type(case: Case, folder: Path):
    with pytest.raises(DataError) as caught:
        case.wrong(folder)
    for part in case.says:
        assert part in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_doing_what_it_says_works(case: Case, folder: Path):
    case.right(folder)  # raises if not
