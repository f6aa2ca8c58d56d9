"""The handwritten digits that lie in scikit-learn."""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.images.image_dataset import ImageDataset
from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.decompress import opened
from jtrain.data.sources.known_sets import find_set, python_package
from jtrain.data.sources.subset import keep_back
from jtrain.errors import DataError

FILE = "digits.csv"
INKS = 16  # a pixel counts the inked ones of 4 x 4


@configclass
class Digits:
    """1,797 handwritten digits, 8 x 8, in 10 classes.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (the test part),
    https://archive.ics.uci.edu/dataset/80; CC BY 4.0.
    """

    kind: Literal["digits"] = "digits"
    validation: float = Field(default=0.2, gt=0, lt=1)
    """The share of the rows that is kept to judge by."""

    def build(self) -> ImageDataset:
        """Images in 0 .. 1 (float32, b 8 8 1); the rows kept back are both validation and test.

        Raises:
            DataError: if the file is not there or not whole.
        """
        package = python_package("scikit-learn", "sklearn", "datasets/data")
        (path,) = find_set("digits", [FILE], package)
        train, kept = keep_back(read_digits(path), self.validation)
        return ImageDataset(train, kept, kept, (8, 8, 1), 10)


def read_digits(path: Path) -> Arrays:
    """`image` (float32, b 8 8 1, in 0 .. 1) and `label` (int32, b) of 64 pixels and a digit a line.

    Raises:
        DataError: a line that is none of a digit; it names the line and the byte.
    """
    with opened(path) as stream:
        data = stream.read()
    rows, place = [], 0
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            rows.append(_digit(path, number, place, line))
        place += len(line) + 1
    if not rows:
        raise DataError(f"{path} was to hold a digit a line and is empty: get it again.")
    table = np.array(rows, np.float32)
    return Arrays(
        image=table[:, :-1].reshape(-1, 8, 8, 1) / INKS, label=table[:, -1].astype(np.int32)
    )


def _digit(path: Path, number: int, place: int, line: bytes) -> list[float]:
    """The 65 numbers of a line."""
    try:
        configclass = [float(word) for word in line.split(b",")]
    except ValueError:
        configclass = []
    if (
        len(configclass) != 65
        or not all(0 <= value <= INKS for value in configclass)
        or configclass[-1] not in range(10)
    ):
        raise DataError(
            f"{path}:{number} was to hold 64 numbers in 0 .. {INKS} and a digit, and at byte "
            f"{place} has {line[:40].decode('ascii', 'replace')!r}. It is cut off or another file: "
            f"get it again (pip install scikit-learn)."
        )
    return configclass
