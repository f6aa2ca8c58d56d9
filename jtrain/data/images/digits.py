"""The handwritten digits that are part of scikit-learn."""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.images.image_dataset import ImageDataset
from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.files import open_decompressed
from jtrain.data.sources.known_sets import find_set, python_package
from jtrain.data.sources.subset import hold_out
from jtrain.errors import DataError

FILE = "digits.csv"
INKS = 16  # a pixel counts the inked pixels in a block of 4 x 4


@configclass
class Digits:
    """1,797 handwritten digits, 8 x 8, in 10 classes.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (the test part),
    https://archive.ics.uci.edu/dataset/80; CC BY 4.0.
    """

    kind: Literal["digits"] = "digits"
    validation: float = Field(default=0.2, gt=0, lt=1)
    """The share of the rows that is held out for validation."""

    def build(self) -> ImageDataset:
        """Read images in 0 .. 1 (float32, b 8 8 1); the held-out rows are validation and test.

        Raises:
            DataError: if the file does not exist or is incomplete.
        """
        package = python_package("scikit-learn", "sklearn", "datasets/data")
        (path,) = find_set("digits", [FILE], package)
        train, held_out = hold_out(read_digits(path), self.validation)
        return ImageDataset(train, held_out, held_out, (8, 8, 1), 10)


def read_digits(path: Path) -> Arrays:
    """Read `image` (float32, b 8 8 1, in 0 .. 1) and `label` (int32, b): 64 pixels and a digit a
    line.

    Raises:
        DataError: a line that is not a digit, by line and byte.
    """
    with open_decompressed(path) as stream:
        data = stream.read()
    rows, place = [], 0
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            rows.append(_parse_line(path, number, place, line))
        place += len(line) + 1
    if not rows:
        raise DataError(f"{path} should hold a digit a line and is empty: get it again.")
    table = np.array(rows, np.float32)
    return Arrays(
        image=table[:, :-1].reshape(-1, 8, 8, 1) / INKS, label=table[:, -1].astype(np.int32)
    )


def _parse_line(path: Path, number: int, place: int, line: bytes) -> list[float]:
    """Return the 65 numbers of a line."""
    try:
        values = [float(word) for word in line.split(b",")]
    except ValueError:
        values = []
    if (
        len(values) != 65
        or not all(0 <= value <= INKS for value in values)
        or values[-1] not in range(10)
    ):
        raise DataError(
            f"{path}:{number} should hold 64 numbers in 0 .. {INKS} and a digit, and at byte "
            f"{place} has {line[:40].decode('ascii', 'replace')!r}. It is cut off or another file: "
            f"get it again (pip install scikit-learn)."
        )
    return values
